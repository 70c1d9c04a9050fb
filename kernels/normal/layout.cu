// Layout: which ranks does each token go to, and how many tokens go to each rank, expert and node?
//
// A thread takes a token. Blocks count in shared memory first, so that global memory sees one addition a block and
// counter instead of one a token. The totals add up in memory that is kept for that, which the last block clears: to
// clear the outputs beforehand would take a second launch.
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/layout.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// The expert that a selection names, -1 for none.
DEEP_EP_DEVICE int expert_at(const LayoutParams& params, int token, int k) {
  return expert_of(params.topk_idx.load_cached(std::int64_t{token} * params.num_topk + k), params.num_experts);
}

DEEP_EP_DEVICE void layout_body(const LayoutParams& params, std::byte* memory) {
  const LayoutShared shared(Carver(memory), params.num_ranks, params.num_experts, params.num_nodes);
  const int num_counters = params.num_ranks + params.num_experts + params.num_nodes;
  const int experts_per_rank = params.num_experts / params.num_ranks;

  // 1. Clear the block's counters.
  for (int i = thread_index(); i < num_counters; i += block_threads()) shared.rank_counts[i] = 0;
  block::sync();

  // 2. Count. A token counts once per rank and once per node, however many of its experts live there. Ranks are bits in
  // a register.
  for (int token = block_index() * block_threads() + thread_index(); token < params.num_tokens;
       token += grid_blocks() * block_threads()) {
    std::uint8_t* in_rank = params.is_token_in_rank + std::int64_t{token} * params.num_ranks;
    std::int32_t* node_count = shared.node_counts;
    int node_end = params.ranks_per_node;
    bool in_node = false;
    constexpr int kBits = 64;
#pragma unroll 1
    for (int first = 0; first < params.num_ranks; first += kBits) {  // once, but in large groups
      std::uint64_t ranks = 0;
      for (int k = 0; k < params.num_topk; ++k) {
        const int expert = expert_at(params, token, k);
        if (expert < 0) continue;
        if (first == 0) fetch_add_relaxed<Scope::block>(&shared.expert_counts[expert], 1);
        const int rank = expert / experts_per_rank - first;
        if (rank >= 0 && rank < kBits) ranks |= std::uint64_t{1} << rank;
      }
      for (int rank = first; rank < params.num_ranks && rank < first + kBits; ++rank, ranks >>= 1) {
        const bool member = (ranks & 1) != 0;
        in_rank[rank] = member ? 1 : 0;
        if (member) fetch_add_relaxed<Scope::block>(&shared.rank_counts[rank], 1);
        in_node = in_node || member;
        if (rank + 1 != node_end) continue;
        if (in_node) fetch_add_relaxed<Scope::block>(node_count, 1);
        ++node_count;
        node_end += params.ranks_per_node;
        in_node = false;
      }
    }
  }
  block::sync();

  // 3. Add the block's counts to the totals.
  for (int i = thread_index(); i < num_counters; i += block_threads()) {
    if (shared.rank_counts[i] != 0) fetch_add_relaxed<Scope::gpu>(&params.work->totals[i], shared.rank_counts[i]);
  }

  // 4. The last block hands the totals out.
  if (!last_block_to_arrive(&params.work->ticket)) return;
  for (int i = thread_index(); i < num_counters; i += block_threads()) {
    const int expert = i - params.num_ranks;
    const int node = expert - params.num_experts;
    std::int32_t* out = node >= 0     ? params.num_tokens_per_node + node
                        : expert >= 0 ? params.num_tokens_per_expert + expert
                                      : params.num_tokens_per_rank + i;
    *out = load_relaxed<Scope::gpu>(&params.work->totals[i]);
    store_relaxed<Scope::gpu>(&params.work->totals[i], 0);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(layout, deep_ep::device::layout_body)
