// The threads of a block wait for warps, barriers and mbarriers.
//
// Whatever they meet at has two meeting points, used in turn. A thread releases the point before it arrives and
// acquires it when it may go on; for ThreadSanitizer in its own context, not in the worker's.
#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/support/format.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

namespace {

constexpr std::uint64_t kTicketMark = 0x6d62617200000000u;  // "mbar" in the upper half
constexpr std::uint64_t kTicketMask = 0xffffffff00000000u;

}  // namespace

/// The current thread's accesses come before those of a thread that acquires the point.
void Block::release(MeetingPoint& point) {
  if (std::exchange(current_->state.acquired, false)) current_->past.acquired = ++acquires_;
  point.join(current_->past);
  tsan::release_as(current_->tsan_context, &point);
}

/// The current thread comes, and returns when all have.
void Block::arrive(Gathering& at) { ++at.arrived < at.threads ? park(at) : advance(at); }

/// All have come: those who wait go on.
void Block::advance(Gathering& at) {
  at.arrived = 0;
  ++at.generation;
  wake(at);
}

/// Says what a thread at this place waits for.
std::string Block::awaited(const Gathering& at) const {
  if (&at == &barrier_) return fmt::format("wait for their block ({} of {} threads came)", at.arrived, at.threads);
  if (at.mbarrier == nullptr) return fmt::format("wait for their warp ({} of {} lanes came)", at.arrived, at.threads);
  return fmt::format("wait for parity {} of {}", at.generation & 1u, describe(static_cast<const MbarrierState&>(at)));
}

/// Does `come()`, which returns when all have come: they see afterwards what any of them wrote before.
template <class Come>
void Block::meet_in_order(Gathering& at, Come come) {
  MeetingPoint* point = nullptr;
  {
    const tsan::Scope as_worker(worker_tsan_context_);
    maybe_interleave();
    point = &at.sync_point[at.generation & 1u];
    release(*point);
    come();
    current_->past.join(*point);
  }
  tsan::acquire(point);
}

// ---- Warps ----

/// Returns when all lanes came, with what they gave. An operation without values orders memory.
const std::byte* Block::meet(const char* op, const void* value, int bytes) {
  Warp& warp = current_warp();
  if (warp.arrived == 0) {
    warp.op = op;
    warp.bytes = bytes;
  } else if (std::strcmp(warp.op, op) != 0 || warp.bytes != bytes) {
    fail<Error>("lanes of a warp are at different operations: warp::{} of {} bytes here, warp::{} of {} bytes there",
                op, bytes, warp.op, warp.bytes);
  }
  count_meeting();
  std::byte* slots = warp.slots[warp.generation & 1u];
  if (bytes > 0) {
    std::memcpy(slots + current_->state.thread % Warp::kLanes * kExchangeSlot, value, static_cast<std::size_t>(bytes));
  }
  arrive(warp);
  return slots;
}

void Block::warp_sync() {
  meet_in_order(current_warp(), [this] { meet("sync", nullptr, 0); });
}

const std::byte* Block::warp_exchange(const char* op, const void* value, int bytes) {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  return meet(op, value, bytes);
}

// ---- The barrier of the block ----

bool Block::block_sync(bool good) {
  bool all_good = false;
  meet_in_order(barrier_, [&] {
    bool& good_so_far = barrier_.good[barrier_.generation & 1u];
    good_so_far = (barrier_.arrived == 0 || good_so_far) && good;
    progress();
    arrive(barrier_);
    all_good = good_so_far;
  });
  return all_good;
}

// ---- Mbarriers. Their word is read in the thread's own context: using one without a barrier after init is a race ----

void Block::mbarrier_init(std::uint64_t& word) {
  std::uint64_t ticket = 0;
  {
    const tsan::Scope as_worker(worker_tsan_context_);
    if (!shared_.contains(&word, sizeof word)) fail<Error>("mbarrier::init of a barrier outside shared memory");
    const auto living = std::ranges::find(mbarriers_, &word, &MbarrierState::mbarrier);
    if (living != mbarriers_.end()) fail<Error>("mbarrier::init of a living barrier: {}", describe(*living));
    mbarriers_.push_back({Gathering(1, &word)});
    ticket = kTicketMark | (mbarriers_.size() - 1);
  }
  word = ticket;
}

void Block::mbarrier_fence_init() {
  const tsan::Scope as_worker(worker_tsan_context_);
  for (MbarrierState& state : mbarriers_) state.fenced = true;
}

/// Throws if no barrier lives at the word.
MbarrierState& Block::mbarrier_at(const std::uint64_t& word, std::uint64_t ticket) {
  const std::uint64_t index = ticket & ~kTicketMask;
  if ((ticket & kTicketMask) != kTicketMark || index >= mbarriers_.size() || mbarriers_[index].mbarrier != &word) {
    fail<Error>("no mbarrier lives at {}: not initialised yet, or overwritten (the word is {:#x})",
                shared_.contains(&word, sizeof word) ? shared_.name(&word) : "an address outside shared memory",
                ticket);
  }
  return mbarriers_[index];
}

std::string Block::describe(const MbarrierState& state) const {
  return fmt::format("mbarrier at {}, phase {}: {} of {} arrivals and {} bytes missing", shared_.name(state.mbarrier),
                     state.generation, state.threads - state.arrived, state.threads, state.expected_bytes);
}

/// The copies that are still under way when all threads are gone; empty if there are none.
std::string Block::unfinished_mbarriers() const {
  for (const MbarrierState& state : mbarriers_) {
    if (!state.loads.empty()) {
      return fmt::format("the block ends before a bulk load of {} bytes into {} was waited for ({})",
                         state.loads.front().bytes, shared_.name(state.loads.front().shared), describe(state));
    }
    if (state.expected_bytes != 0) {
      return fmt::format("the block ends with an mbarrier whose expected and loaded bytes differ ({})",
                         describe(state));
    }
  }
  return {};
}

void Block::mbarrier_arrive(std::uint64_t& word, std::uint32_t expected_bytes) {
  const std::uint64_t ticket = word;
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  MbarrierState& state = mbarrier_at(word, ticket);
  if (state.arrived == state.threads) fail<Error>("one arrival too many at an mbarrier: {}", describe(state));
  release(state.sync_point[state.generation & 1u]);
  ++state.arrived;
  state.expected_bytes += expected_bytes;
  end_phase(state);
}

/// Ends the phase if nothing is missing.
void Block::end_phase(MbarrierState& state) {
  if (state.arrived != state.threads || state.expected_bytes != 0) return;
  progress();
  advance(state);
}

/// Does loads that were issued for the barrier. Not `all`: a seeded schedule leaves some for later.
void Block::run_loads(MbarrierState& state, bool all) {
  for (std::size_t left = state.loads.size(); left > 0; --left) {
    if (!all && random_.chance(2)) continue;
    const std::size_t which = random_.below(static_cast<std::uint32_t>(state.loads.size()));
    const BulkLoad load = state.loads[which];
    state.loads.erase(state.loads.begin() + static_cast<std::ptrdiff_t>(which));
    execute(load);
    {
      const tsan::Scope as_issuer(load.issuer->tsan_context);
      tsan::release(&state.sync_point[state.generation & 1u]);
    }
    state.expected_bytes -= load.bytes;
    end_phase(state);
  }
}

/// Bytes come no earlier than a thread needs them.
void Block::mbarrier_wait(std::uint64_t& word, std::uint32_t parity) {
  const std::uint64_t ticket = word;
  MeetingPoint* point = nullptr;
  {
    const tsan::Scope as_worker(worker_tsan_context_);
    maybe_interleave();
    MbarrierState& state = mbarrier_at(word, ticket);
    if (parity > 1) fail<Error>("mbarrier::wait for parity {}; allowed: 0 and 1", parity);
    for (;;) {
      if (!state.ended(parity)) run_loads(state, /*all=*/true);
      if (state.ended(parity)) break;
      progress();
      park(state);
    }
    point = &state.sync_point[parity];
    current_->past.join(*point);
  }
  tsan::acquire(point);
}

}  // namespace deep_ep::host_machine
