// Layout: which ranks does each token go to, and how many tokens go to each rank, expert and node?
//
// A thread takes a token, and a rank or a node. Blocks count in shared memory first, so that global memory sees one
// addition a block and counter instead of one a token. The totals add up in memory that is kept for that, which the
// last block clears: to clear the outputs beforehand would take a second launch.
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/layout.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE int expert_at(const LayoutParams& params, int token, int k) {
  return expert_of(params.topk_idx.load_cached(std::int64_t{token} * params.num_topk + k), params.num_experts);
}

DEEP_EP_DEVICE void layout_body(const LayoutParams& params, std::byte* memory) {
  const int counters = params.counters();
  auto* const counts = reinterpret_cast<std::int32_t*>(memory);  // of ranks, then of nodes, then of experts
  std::int32_t* const expert_counts = counts + params.num_ranks + params.num_nodes;
  const int experts_per_rank = params.num_experts / params.num_ranks;

  for (int i = thread_index(); i < counters; i += block_threads()) counts[i] = 0;
  block::sync();

  // A token counts once per rank and once per node, however many of its experts live there. The threads of a
  // token share its selections, each of which counts for its expert.
  const auto count = [](std::int32_t& counter) { fetch_add_relaxed<Scope::block>(&counter, 1); };
  for (auto at = static_cast<std::uint32_t>(block_index() * block_threads() + thread_index());
       at < static_cast<std::uint32_t>(params.num_tokens * params.columns);
       at += static_cast<std::uint32_t>(grid_blocks() * block_threads())) {
    const int token = static_cast<int>(at) / params.columns, column = static_cast<int>(at) % params.columns;
    const int node = column - params.num_ranks;
    const int experts = node < 0 ? experts_per_rank : params.ranks_per_node * experts_per_rank;
    const int first = (node < 0 ? column : node) * experts;
    bool member = false;
#pragma unroll 4
    for (int k = 0; k < params.num_topk; ++k) {
      const int expert = expert_at(params, token, k) - first;
      member |= expert >= 0 && expert < experts;
    }
    if (member) count(counts[column]);
    if (node < 0) params.is_token_in_rank[std::int64_t{token} * params.num_ranks + column] = member ? 1 : 0;
    for (int k = column; k < params.num_topk; k += params.columns) {
      const int expert = expert_at(params, token, k);
      if (expert >= 0) count(expert_counts[expert]);
    }
  }
  block::sync();

  for (int i = thread_index(); i < counters; i += block_threads()) {
    if (counts[i] != 0) fetch_add_relaxed<Scope::gpu>(&params.work->totals[i], counts[i]);
  }

  // The last block hands the totals out.
  if (!last_block_to_arrive(&params.work->ticket)) return;
  for (int i = thread_index(); i < counters; i += block_threads()) {
    const int node = i - params.num_ranks;
    const int expert = node - params.num_nodes;
    std::int32_t* out = expert >= 0 ? params.num_tokens_per_expert + expert
                        : node >= 0 ? params.num_tokens_per_node + node
                                    : params.num_tokens_per_rank + i;
    *out = load_relaxed<Scope::gpu>(&params.work->totals[i]);
    store_relaxed<Scope::gpu>(&params.work->totals[i], 0);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(layout, deep_ep::device::layout_body)
