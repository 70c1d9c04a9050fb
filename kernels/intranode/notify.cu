// Notify: ranks exchange how many rows they will send, and every row's final place becomes known.
//
// Rows lie in a receiver's output by source rank, then by token index at the source. So the place of token t at rank d
// is: rows that d gets from the ranks before us, plus our tokens before t that also go to d. The first number comes
// from the peers, the second from a scan of the membership. Blocks share the destinations, on a GPU one each.
#include "kernels/common/call_comparison.hpp"
#include "kernels/common/numbering.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/intranode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// Numbers the members of column `destination` in token order; returns how many there are. -1 for the others.
DEEP_EP_DEVICE int number_members(const NotifyParams& params, int destination, NotifyShared& shared) {
  const auto at = [&](int token) { return std::int64_t{token} * params.common.num_ranks + destination; };
  return number_members(
      params.num_tokens, shared.members_in_warp, [&](int token) { return params.is_token_in_rank[at(token)] != 0; },
      [&](int token, int number) { params.destination_row[at(token)] = number; });
}

/// Writes this block's share of our counts into every peer's slot, then raises the peers' signals.
DEEP_EP_DEVICE void publish_counts(const NotifyParams& params, std::uint64_t epoch, int destination, int count,
                                   const NotifyShared& shared) {
  const IntranodeParams& common = params.common;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    const NotifySlot slot = common.control.notify_slot(common.heaps[peer], epoch, common.rank);
    slot.tokens_per_rank[destination] = count;
    if (destination != 0) continue;
    *slot.shape = params.shape;
    slot.shape->word[CallShape::kUnknownExpert] = shared.unknown_expert;
  }
  const NotifySlot slot = common.control.notify_slot(common.heaps[destination], epoch, common.rank);
  for (int expert = thread_index(); expert < params.num_local_experts; expert += block_threads()) {
    slot.tokens_per_expert[expert] = params.num_tokens_per_expert[destination * params.num_local_experts + expert];
  }
  block::sync();
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    fetch_add_release<Scope::system>(common.signal_to(peer, IntranodeSignal::notify), std::uint64_t{1});
  }
}

/// Waits until every rank has published for every destination. False after a fault.
DEEP_EP_DEVICE bool await_counts(const NotifyParams& params, std::uint64_t epoch, NotifyShared& shared) {
  const IntranodeParams& common = params.common;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    const std::uint64_t expected = epoch * static_cast<std::uint64_t>(common.num_ranks);
    if (!wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::notify),
                     {peer, Wanted::counts, expected})) {
      store_relaxed<Scope::block>(&shared.failed, 1);
    }
  }
  block::sync();
  const bool arrived = shared.failed == 0;
  block::sync();  // compare_calls writes `failed` again
  return arrived;
}

/// Do all ranks mean the same call, and do their counts make sense? A fault, seen by every rank, if not.
DEEP_EP_DEVICE void compare_calls(const NotifyParams& params, std::uint64_t epoch, NotifyShared& shared) {
  const IntranodeParams& common = params.common;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    const NotifySlot slot = common.counts_from(peer, epoch);
    if (!agrees_on_call(params, *slot.shape, peer)) store_relaxed<Scope::block>(&shared.failed, 1);
    for (int rank = 0; rank < common.num_ranks; ++rank) {
      if (slot.tokens_per_rank[rank] >= 0) continue;
      report_fault(params.wait, FaultKind::inconsistent_counts, Wanted::counts, peer, rank, 0, 0);
      store_relaxed<Scope::block>(&shared.failed, 1);
      break;
    }
  }
  block::sync();
}

/// The tables that outlive the call, and what the host waits for.
DEEP_EP_DEVICE void write_results(const NotifyParams& params, std::uint64_t epoch) {
  const IntranodeParams& common = params.common;
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    std::int32_t end = 0;
    for (int source = 0; source < common.num_ranks; ++source) {
      end += common.counts_from(source, epoch).tokens_per_rank[rank];
      params.rank_prefix_matrix[source * common.num_ranks + rank] = end;
    }
    if (rank == common.rank && params.host_counts != nullptr) params.host_counts->num_recv_tokens = end;
  }
  if (params.host_counts == nullptr) return;
  for (int expert = thread_index(); expert < params.num_local_experts; expert += block_threads()) {
    std::int32_t count = 0;
    for (int source = 0; source < common.num_ranks; ++source) {
      count += common.counts_from(source, epoch).tokens_per_expert[expert];
    }
    const std::int32_t alignment = params.expert_alignment;
    params.host_counts->tokens_per_expert[expert] = (count + alignment - 1) / alignment * alignment;
  }
}

DEEP_EP_DEVICE void notify_body(const NotifyParams& params, std::byte* memory) {
  auto& shared = *reinterpret_cast<NotifyShared*>(memory);
  const IntranodeParams& common = params.common;
  const Call call = Call::begin(common.state->notify, params.wait, &shared.scratch);
  const std::uint64_t epoch = call.epoch;
  const bool begun = call.begun;
  if (thread_index() == 0) shared.failed = 0;
  // Loaded early: the record lies in the host's memory.
  const bool tells = begun && block_index() == 0 && thread_index() == 0;
  const std::int64_t unknown_expert = tells ? unknown_expert_to_tell(params) : 0;

  // 1. Number our tokens for each destination. Counts that the caller got wrong travel as -1, so that all ranks know.
  // 2. Exchange counts.
  for (int destination = block_index(); begun && destination < common.num_ranks; destination += grid_blocks()) {
    int count = number_members(params, destination, shared);
    if (count != params.num_tokens_per_rank[destination]) count = -1;
    if (destination == 0) {
      if (thread_index() == 0) shared.unknown_expert = unknown_expert;
      block::sync();
    }
    publish_counts(params, epoch, destination, count, shared);
  }
  const bool arrived = begun && await_counts(params, epoch, shared);

  // 3. Add the rows of the ranks before us. Each thread meets the tokens that it numbered itself.
  for (int destination = block_index(); arrived && destination < common.num_ranks; destination += grid_blocks()) {
    std::int32_t first_row = 0;
    for (int source = 0; source < common.rank; ++source) {
      first_row += common.counts_from(source, epoch).tokens_per_rank[destination];
    }
    for (int token = thread_index(); token < params.num_tokens; token += block_threads()) {
      std::int32_t& row = params.destination_row[std::int64_t{token} * common.num_ranks + destination];
      if (row >= 0) row += first_row;
    }
  }

  // 4. One block writes the tables and wakes the host.
  if (arrived && block_index() == 0) {
    compare_calls(params, epoch, shared);
    if (shared.failed == 0) write_results(params, epoch);
    block::sync();
    if (thread_index() == 0 && params.host_counts != nullptr) {
      store_release<Scope::system>(&params.host_counts->epoch, epoch);
    }
  }

  call.end([] {});
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(notify, deep_ep::device::notify_body)
