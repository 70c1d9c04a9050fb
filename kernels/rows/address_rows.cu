// Which rows go back to which rank, and what each carries for its token. A warp takes a row of the metadata.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// By a lane: the weight of selection k of a row.
DEEP_EP_DEVICE float weight_of(const AddressRowsParams& params, std::int64_t row, int k) {
  if (!params.weights_of_slots) return load_weak(params.weights + row * params.metadata.num_topk + k);
  const std::int32_t slot = load_weak(params.metadata.slots(row) + k);
  return slot >= 0 && slot < params.num_weights ? load_weak(params.weights + slot) : 0.0f;
}

/// By a whole warp: each selection's row of a received row by itself. `first_id`: of the token's selections. Returns
/// how many rows go.
DEEP_EP_DEVICE int address_selections(const AddressRowsParams& params, std::int64_t row, std::int32_t source,
                                      std::int32_t first_id) {
  std::int64_t slot = -1;
  if (lane_index() < params.metadata.num_topk) slot = load_weak(params.metadata.slots(row) + lane_index());
  const bool sent = slot >= 0 && slot < params.num_sent;
  if (sent) {
    params.is_token_in_rank[slot * params.num_ranks + source] = 1;
    params.beside[slot * params.columns] = first_id + lane_index();
  }
  return count_bits(warp::ballot(sent));
}

/// By a whole warp: the received row, under its last selection.
DEEP_EP_DEVICE int address_row(const AddressRowsParams& params, std::int64_t row, std::int32_t first_id) {
  const int num_topk = params.metadata.num_topk;
  std::int32_t* const beside = params.beside + row * params.columns;
  if (lane_index() == 0) {
    beside[0] = first_id + (num_topk == 0 ? 0 : load_weak(params.metadata.row(row) + 1) % num_topk);
  }
  if (params.weights != nullptr && lane_index() < num_topk) {
    reinterpret_cast<float*>(beside)[1 + lane_index()] = weight_of(params, row, lane_index());
  }
  return 1;
}

DEEP_EP_DEVICE void address_rows_body(const AddressRowsParams& params, std::byte* memory) {
  auto* const counts = reinterpret_cast<std::int32_t*>(memory);  // of rows for each rank, by this block
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) counts[rank] = 0;
  block::sync();

  const std::int64_t valid = params.metadata.valid();
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  const std::int64_t rows = params.each_selection ? valid : params.metadata.num_rows;
  for (std::int64_t row = std::int64_t{block_index()} * block_warps() + warp_index(); row < rows; row += warps) {
    const std::int32_t origin = row < valid ? load_weak(params.metadata.row(row)) : -1;
    const std::int32_t source = origin < 0 ? -1 : origin / params.max_tokens;
    const bool goes = source >= 0 && source < params.num_ranks;
    for (int rank = lane_index(); !params.each_selection && rank < params.num_ranks; rank += kWarpSize) {
      params.is_token_in_rank[row * params.num_ranks + rank] = goes && rank == source ? 1 : 0;
    }
    if (!goes) continue;
    const std::int32_t first_id = (origin - source * params.max_tokens) * params.metadata.num_topk;
    const int sent =
        params.each_selection ? address_selections(params, row, source, first_id) : address_row(params, row, first_id);
    if (lane_index() == 0 && sent != 0) fetch_add_relaxed<Scope::block>(&counts[source], sent);
  }
  block::sync();
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) {
    if (counts[rank] != 0) fetch_add_relaxed<Scope::gpu>(&params.num_tokens_per_rank[rank], counts[rank]);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(address_rows, deep_ep::device::address_rows_body)
