// Which rows go back to which rank, and what each carries for its token. A warp takes a row of the metadata.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// By a lane: the weight of selection k of a row.
DEEP_EP_DEVICE float weight_of(const AddressRowsParams& params, std::int64_t row, int k) {
  if (!params.weights_of_slots) return load_weak(params.weights + row * params.metadata.num_topk + k);
  const std::int32_t slot = load_weak(params.metadata.slots(row) + k);
  return slot >= 0 && slot < params.num_weights ? load_weak(params.weights + slot) : 0.0f;
}

/// By a whole warp: what is said of a valid row.
DEEP_EP_DEVICE void address(const AddressRowsParams& params, std::int64_t row) {
  const int num_topk = params.metadata.num_topk, lane = lane_index();
  const std::int32_t origin = load_weak(params.metadata.row(row));
  const std::int32_t source = origin < 0 ? -1 : origin / params.max_tokens;
  if (source < 0 || source >= params.num_ranks) return;
  // The row that the lane sends, and the selection that it belongs to: the lane's own, or the last one.
  std::int64_t sent = -1;
  int selection = lane;
  if (params.each_selection) {
    if (lane < num_topk) sent = load_weak(params.metadata.slots(row) + lane);
  } else if (lane == 0) {
    sent = row;
    selection = load_weak(params.metadata.row(row) + 1) % num_topk;
  }
  if (sent >= 0 && sent < params.num_sent) {
    params.is_token_in_rank[sent * params.num_ranks + source] = 1;
    params.beside[sent * params.columns] = (origin - source * params.max_tokens) * num_topk + selection;
  }
  if (params.weights != nullptr && lane < num_topk) {
    reinterpret_cast<float*>(params.beside + row * params.columns)[1 + lane] = weight_of(params, row, lane);
  }
}

DEEP_EP_DEVICE void address_rows_body(const AddressRowsParams& params, std::byte* /*shared*/) {
  const std::int64_t valid = params.metadata.valid(), warps = std::int64_t{grid_blocks()} * block_warps();
  for (std::int64_t row = std::int64_t{block_index()} * block_warps() + warp_index(); row < valid; row += warps) {
    address(params, row);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(address_rows, deep_ep::device::address_rows_body)
