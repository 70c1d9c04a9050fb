// How many rows go to each rank, from what the blocks of address_rows have counted. A warp takes a rank.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void add_row_counts_body(const AddressRowsParams& params, std::byte* /*shared*/) {
  const int warps = grid_blocks() * block_warps();
  for (int rank = block_index() * block_warps() + warp_index(); rank < params.num_ranks; rank += warps) {
    std::int32_t rows = 0;
    for (int block = lane_index(); block < params.counting_blocks; block += kWarpSize) {
      rows += load_weak(params.block_counts + std::int64_t{block} * params.num_ranks + rank);
    }
    rows = warp::sum(rows);
    if (lane_index() == 0) params.num_tokens_per_rank[rank] = rows;
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(add_row_counts, deep_ep::device::add_row_counts_body)
