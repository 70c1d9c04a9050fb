// The threads of a block wait for warps, barriers and mbarriers.
//
// Whatever they meet at has two meeting points, used in turn. A thread releases the point before it arrives and
// acquires it when it may go on; for ThreadSanitizer in its own context: outside MachineScope.
#include <cstring>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "machine/block.hpp"
#include "machine/machine_scope.hpp"

namespace deep_ep::host_machine {

namespace {

const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::sync:
      return "sync";
    case WarpOp::shuffle:
      return "shuffle";
    case WarpOp::shuffle_xor:
      return "shuffle_xor";
    case WarpOp::ballot:
      return "ballot, any or all";
    case WarpOp::sum:
      return "sum";
    case WarpOp::max:
      return "max";
    case WarpOp::inclusive_sum:
      return "inclusive_sum";
    case WarpOp::match:
      return "match_any";
  }
  return "?";
}

}  // namespace

/// The current thread's accesses come before those of a thread that acquires the point.
void Block::release(MeetingPoint& point) {
  proxies_.release(*current_, point);
  tsan::release_as(current_->tsan_context, &point);
}

// ---- Warps ----

/// Returns when all lanes came, with what they gave.
const std::byte* Block::meet(WarpOp op, const void* value, int bytes) {
  Warp& warp = current_warp();
  if (warp.arrived == 0) {
    warp.op = op;
    warp.bytes = bytes;
  } else if (warp.op != op || warp.bytes != bytes) {
    fail<Error>("lanes of a warp are at different operations: warp::{} of {} bytes here, warp::{} of {} bytes there",
                name_of(op), bytes, name_of(warp.op), warp.bytes);
  }
  count_meeting();
  std::byte* slots = warp.slots[warp.generation & 1u];
  if (bytes > 0) {
    std::memcpy(slots + current_->state.thread % Warp::kLanes * kExchangeSlot, value, static_cast<std::size_t>(bytes));
  }
  if (warp.arrived + 1 < Warp::kLanes) {
    warp.waiting[warp.arrived++] = current_;
    park(Fiber::Wait::warp, &warp);
  } else {
    for (int i = 0; i < warp.arrived; ++i) wake(*warp.waiting[i]);
    warp.arrived = 0;
    ++warp.generation;
    if (op == WarpOp::sync) shared_.flush();
  }
  return slots;
}

void Block::warp_sync() {
  MeetingPoint* point = nullptr;
  {
    const MachineScope scope(current_->tsan_context, worker_tsan_context_);
    maybe_interleave();
    Warp& warp = current_warp();
    point = &warp.sync_point[warp.generation & 1u];
    release(*point);
    meet(WarpOp::sync, nullptr, 0);
    proxies_.acquire(*current_, *point);
  }
  tsan::acquire(point);
}

const std::byte* Block::warp_exchange(WarpOp op, const void* value, int bytes) {
  const MachineScope scope(current_->tsan_context, worker_tsan_context_);
  maybe_interleave();
  return meet(op, value, bytes);
}

// ---- The barrier of the block ----

void Block::block_sync() {
  MeetingPoint* point = nullptr;
  {
    const MachineScope scope(current_->tsan_context, worker_tsan_context_);
    maybe_interleave();
    point = &barrier_.sync_point[barrier_.generation & 1u];
    release(*point);
    progress();
    if (++barrier_.arrived == current_->state.block_threads) {
      shared_.flush();
      for (Fiber* fiber : barrier_.waiting) wake(*fiber);
      barrier_.waiting.clear();
      barrier_.arrived = 0;
      ++barrier_.generation;
    } else {
      barrier_.waiting.push_back(current_);
      park(Fiber::Wait::barrier, &barrier_);
    }
    proxies_.acquire(*current_, *point);
  }
  tsan::acquire(point);
}

// ---- Mbarriers. Their word is read in the thread's own context: using one without a barrier after init is a race ----

void Block::mbarrier_init(std::uint64_t& word, std::uint32_t arrivals) {
  std::uint64_t ticket = 0;
  {
    const MachineScope scope(current_->tsan_context, worker_tsan_context_);
    ticket = mbarriers_.init(word, arrivals);
  }
  word = ticket;
}

void Block::mbarrier_fence_init() {
  const MachineScope scope(current_->tsan_context, worker_tsan_context_);
  mbarriers_.fence_init();
}

void Block::mbarrier_arrive(std::uint64_t& word, std::uint32_t expected_bytes) {
  const std::uint64_t ticket = word;
  const MachineScope scope(current_->tsan_context, worker_tsan_context_);
  maybe_interleave();
  MbarrierState& state = mbarriers_.find(word, ticket);
  if (state.missing == 0) {
    fail<Error>("one arrival too many at an mbarrier: {}", mbarriers_.describe(state));
  }
  shared_.flush();
  release(state.sync_point[state.phase & 1u]);
  --state.missing;
  state.expected_bytes += expected_bytes;
  advance(state);
}

void Block::advance(MbarrierState& state) {
  if (!state.advance()) return;
  progress();
  for (Fiber* fiber : state.waiting) wake(*fiber);
  state.waiting.clear();
}

/// Does loads that were issued for the barrier. Not `all`: a seeded schedule leaves some for later.
void Block::run_loads(MbarrierState& state, bool all) {
  for (std::size_t left = state.loads.size(); left > 0; --left) {
    if (!all && random_.chance(2)) continue;
    const std::size_t which = random_.below(static_cast<std::uint32_t>(state.loads.size()));
    const BulkLoad load = state.loads[which];
    state.loads.erase(state.loads.begin() + static_cast<std::ptrdiff_t>(which));
    bulk_.execute(load);
    {
      const tsan::Scope as_issuer(load.issuer->tsan_context);
      tsan::release(&state.sync_point[state.phase & 1u]);
    }
    state.expected_bytes -= load.bytes;
    advance(state);
  }
}

bool Block::mbarrier_test(std::uint64_t& word, std::uint32_t parity) {
  const std::uint64_t ticket = word;
  MeetingPoint* point = nullptr;
  bool ended = false;
  {
    const MachineScope scope(current_->tsan_context, worker_tsan_context_);
    maybe_interleave();
    MbarrierState& state = mbarriers_.find(word, ticket);
    if (parity > 1) fail<Error>("mbarrier::test for parity {}; allowed: 0 and 1", parity);
    if (!state.ended(parity)) run_loads(state, /*all=*/false);
    ended = state.ended(parity);
    point = &state.sync_point[parity];
    if (ended) proxies_.acquire(*current_, *point);
  }
  if (ended) tsan::acquire(point);
  return ended;
}

void Block::mbarrier_wait(std::uint64_t& word, std::uint32_t parity) {
  const std::uint64_t ticket = word;
  MeetingPoint* point = nullptr;
  {
    const MachineScope scope(current_->tsan_context, worker_tsan_context_);
    maybe_interleave();
    MbarrierState& state = mbarriers_.find(word, ticket);
    if (parity > 1) fail<Error>("mbarrier::wait for parity {}; allowed: 0 and 1", parity);
    // Bytes come no earlier than a thread needs them: a thread that does not wait finds them missing.
    while (!state.ended(parity)) {
      run_loads(state, /*all=*/true);
      if (state.ended(parity)) break;
      state.waiting.push_back(current_);
      progress();
      park(Fiber::Wait::mbarrier, &state, parity);
    }
    point = &state.sync_point[parity];
    proxies_.acquire(*current_, *point);
  }
  tsan::acquire(point);
}

}  // namespace deep_ep::host_machine
