// Notify: ranks exchange how many rows they will send, and every row's final place becomes known (normal/notify.hpp).
// Blocks share the destinations, on a GPU one each.
#include "kernels/intranode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/notify.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// Writes this block's share of our counts into every peer's slot, then raises the peers' signals. `experts`: how many
/// selections each expert of the destination has.
DEEP_EP_DEVICE void publish_counts(const NotifyParams& params, std::uint64_t epoch, int destination, int count,
                                   const std::int32_t* experts, const NotifyShared& shared) {
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
    slot.tokens_per_expert[expert] = experts[expert];
  }
  block::sync();
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    fetch_add_release<Scope::system>(common.signal_to(peer, IntranodeSignal::notify), std::uint64_t{1});
  }
}

/// Waits until every rank has published for every destination. False after a fault.
DEEP_EP_DEVICE bool await_counts(const NotifyParams& params, std::uint64_t epoch, NotifyShared& shared) {
  const IntranodeParams& common = params.common;
  bool good = true;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    const std::uint64_t expected = epoch * static_cast<std::uint64_t>(common.num_ranks);
    good =
        wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::notify), {peer, Wanted::counts, expected}) &&
        good;
  }
  return whole_block(good, &shared.scratch);
}

DEEP_EP_DEVICE void notify_body(const NotifyParams& params, std::byte* memory) {
  auto& shared = *reinterpret_cast<NotifyShared*>(memory);
  const IntranodeParams& common = params.common;
  const Call call = Call::begin(common.state->notify, params.wait, &shared.scratch);
  const std::uint64_t epoch = call.epoch;
  const bool begun = call.begun;
  // Loaded early: the record lies in the host's memory.
  const bool tells = begun && block_index() == 0 && thread_index() == 0;
  const std::int64_t unknown_expert = tells ? unknown_expert_to_tell(params) : 0;

  // 1. Number our tokens for each destination.
  // 2. Exchange counts.
  for (int destination = block_index(); begun && destination < common.num_ranks; destination += grid_blocks()) {
    const std::int32_t count = number_for_rank(params, common.num_ranks, destination, shared.numbering);
    const std::int32_t* experts = params.num_tokens_per_expert + std::int64_t{destination} * params.num_local_experts;
    if (destination == 0) {
      if (thread_index() == 0) shared.unknown_expert = unknown_expert;
      block::sync();
    }
    publish_counts(params, epoch, destination, count, experts, shared);
  }
  const bool arrived = begun && await_counts(params, epoch, shared);

  // 3. Add the rows of the ranks before us.
  const auto counts_of = [&](int source) { return common.counts_from(source, epoch); };
  const AllCounts counts{params, common.rank, common.num_ranks, counts_of};
  for (int destination = block_index(); arrived && destination < common.num_ranks; destination += grid_blocks()) {
    counts.add_rows_before(destination);
  }

  // 4. One block writes the tables and wakes the host.
  if (arrived && block_index() == 0) counts.finish(epoch, &shared.scratch, [] {});

  call.end([] {});
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(notify, deep_ep::device::notify_body)
