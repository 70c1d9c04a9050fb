// How many selections of each expert are among the received rows: every block counts those of its own rows, and tells
// the kernel that numbers them.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/shares.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void count_selections_body(const NumberRowsParams& params, std::byte* memory) {
  if (load_relaxed<Scope::gpu>(params.abort) != 0) return;
  auto* const counts = reinterpret_cast<std::int32_t*>(memory);
  for (int expert = thread_index(); expert < params.num_experts; expert += block_threads()) counts[expert] = 0;
  block::sync();
  const Share share = selections_of_block(params);
  for (std::int64_t at = share.begin + thread_index(); at < share.end; at += block_threads()) {
    const int expert = expert_of(params.recv_topk_idx.load_cached(at), params.num_experts);
    if (expert >= 0) fetch_add_relaxed<Scope::block>(&counts[expert], 1);
  }
  block::sync();
  std::int32_t* const told = params.block_counts + std::int64_t{block_index()} * params.num_experts;
  for (int expert = thread_index(); expert < params.num_experts; expert += block_threads())
    told[expert] = counts[expert];
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(count_selections, deep_ep::device::count_selections_body)
