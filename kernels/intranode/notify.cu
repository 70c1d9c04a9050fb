// Notify: ranks exchange how many rows they will send, and every row's final place becomes known (normal/notify.hpp).
// Blocks share the destinations, on a GPU one each.
#include "kernels/intranode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/notify.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// By a whole block, without layout: numbers this rank's tokens that select experts of `destination`, and counts the
/// selections of each expert. Returns how many tokens there are.
DEEP_EP_DEVICE std::int32_t number_selecting(const NotifyParams& params, int destination, NotifyShared& shared) {
  constexpr int kTogether = 8;  // loads under way at once
  const int experts = params.num_local_experts, num_ranks = params.common.num_ranks, num_topk = params.num_topk;
  for (int expert = thread_index(); expert < experts; expert += block_threads()) shared.expert_counts[expert] = 0;
  block::sync();
  // A warp loads the selections of its 32 tokens in the order of memory. Lane i keeps which ones of the i-th 32 select
  // such experts; those of a token lie in one such word, or two.
  const std::int64_t end = std::int64_t{params.num_tokens} * num_topk;
  const auto selects = [&](int token) {
    const std::int64_t begin = std::int64_t{token - lane_index()} * num_topk + lane_index();
    std::uint32_t kept = 0;
    for (int first = 0; first < num_topk; first += kTogether) {
      std::int64_t index[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::int64_t at = begin + (first + i) * kWarpSize;
        index[i] = first + i < num_topk && at < end ? params.topk_idx.load_cached(at) : -1;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int local = expert_of(index[i], experts * num_ranks) - destination * experts;
        const bool selected = index[i] >= 0 && local >= 0 && local < experts;
        const std::uint32_t all = warp::ballot(selected);
        if (lane_index() == first + i) kept = all;
        if (selected) fetch_add_relaxed<Scope::block>(&shared.expert_counts[local], 1);
      }
    }
    const int bit = lane_index() * num_topk;
    const std::uint64_t low = warp::shuffle(kept, bit / kWarpSize);
    const std::uint64_t high = warp::shuffle(kept, bit / kWarpSize + 1);
    const std::uint64_t of_token = (high << 32 | low) >> bit % kWarpSize;
    return (of_token & ((std::uint64_t{1} << num_topk) - 1)) != 0;
  };
  return number_members(params.num_tokens, shared.numbering, selects, [&](int token, int number) {
    params.destination_row[std::int64_t{token} * num_ranks + destination] = number;
  });
}

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
    const bool laid_out = params.is_token_in_rank != nullptr;
    const std::int32_t count = laid_out ? number_for_rank(params, common.num_ranks, destination, shared.numbering)
                                        : number_selecting(params, destination, shared);
    const std::int32_t* experts = shared.expert_counts;
    if (laid_out) experts = params.num_tokens_per_expert + std::int64_t{destination} * params.num_local_experts;
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
