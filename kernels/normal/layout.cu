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

/// Consecutive ranks as bits in registers.
struct RankSet {
  static constexpr int kMost = 128;
  std::uint64_t low = 0, high = 0;
  /// Ranks beyond the set are left out.
  DEEP_EP_DEVICE void insert(int rank) {
    if (rank >= 0 && rank < kMost) (rank < 64 ? low : high) |= std::uint64_t{1} << (rank & 63);
  }
  DEEP_EP_DEVICE bool contains(int rank) const { return ((rank < 64 ? low : high) >> (rank & 63) & 1) != 0; }
  DEEP_EP_DEVICE bool any_of(int begin, int end) const {
    bool any = false;
    for (int rank = begin < 0 ? 0 : begin; rank < end && rank < kMost; ++rank) any |= contains(rank);
    return any;
  }
};

DEEP_EP_DEVICE void layout_body(const LayoutParams& params, std::byte* memory) {
  const LayoutShared shared(Carver(memory), params.num_ranks, params.num_experts, params.num_nodes);
  const int num_counters = params.num_ranks + params.num_experts + params.num_nodes;
  const int experts_per_rank = params.num_experts / params.num_ranks;

  // 1. Clear the block's counters.
  for (int i = thread_index(); i < num_counters; i += block_threads()) shared.rank_counts[i] = 0;
  block::sync();

  // 2. Count. A token counts once per rank and once per node, however many of its experts live there.
  for (int token = block_index() * block_threads() + thread_index(); token < params.num_tokens;
       token += grid_blocks() * block_threads()) {
    std::uint8_t* in_rank = params.is_token_in_rank + std::int64_t{token} * params.num_ranks;
    int node = 0;
    bool in_node = false;
#pragma unroll 1
    for (int first = 0; first < params.num_ranks; first += RankSet::kMost) {  // once, but in very large groups
      RankSet ranks;
      for (int k = 0; k < params.num_topk; ++k) {
        const int expert = expert_at(params, token, k);
        if (expert < 0) continue;
        if (first == 0) fetch_add_relaxed<Scope::block>(&shared.expert_counts[expert], 1);
        ranks.insert(expert / experts_per_rank - first);
      }
      const int behind = first + RankSet::kMost;
      for (int rank = first; rank < params.num_ranks && rank < behind; ++rank) {
        const bool member = ranks.contains(rank - first);
        in_rank[rank] = member ? 1 : 0;
        if (member) fetch_add_relaxed<Scope::block>(&shared.rank_counts[rank], 1);
      }
      for (; node < params.num_nodes; ++node, in_node = false) {
        const int begin = node * params.ranks_per_node, end = begin + params.ranks_per_node;
        in_node = in_node || ranks.any_of(begin - first, end - first);
        if (end > behind) break;  // its other ranks come next
        if (in_node) fetch_add_relaxed<Scope::block>(&shared.node_counts[node], 1);
      }
    }
  }
  block::sync();

  // 3. Add the block's counts to the totals.
  for (int i = thread_index(); i < num_counters; i += block_threads()) {
    if (shared.rank_counts[i] != 0) fetch_add_relaxed<Scope::gpu>(&params.work->totals[i], shared.rank_counts[i]);
  }

  // 4. The last block hands the totals out.
  if (!last_block_to_arrive(&params.work->ticket, shared.rank_counts)) return;
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
