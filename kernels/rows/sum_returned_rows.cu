// Sums of the rows that came back for each token: like sum_rows, with rows that the token's selections lead to.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/row_pieces.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void sum_returned_rows_body(const ReturnedRowsParams& params, std::byte* /*shared*/) {
  const std::int64_t came = load_weak(params.num_valid);
  const std::int64_t num_rows = came < params.num_rows ? came : params.num_rows;
  const int lane = lane_index();
  for_each_piece(params.num_tokens, params.row_bytes, [&](std::int64_t token, std::uint32_t offset, int vectors) {
    // 1. A lane for each selection: does the rank that has its expert come last with it?
    const std::int64_t at = token * params.num_topk + lane;
    const std::int64_t index = lane < params.num_topk ? params.topk_idx.load_cached(at) : -1;
    const bool chosen = index >= 0;
    // Lanes without a selection are alone with their number, which no rank has.
    const auto owner = static_cast<std::uint32_t>(chosen ? index / params.num_experts : -1 - lane);
    const std::uint32_t same = warp::match_any(owner);
    const int last = highest_bit(same);

    // 2. Which row came for it? The row must say the same.
    std::int64_t row = -1;
    if (chosen && (params.each_selection || last == lane)) {
      row = load_weak(params.row_of + at);
      if (row < 0 || row >= num_rows || load_weak(params.beside + row * params.beside_stride) != at) row = -1;
    }
    sum_piece(row_address(params.rows, row, params.row_bytes), warp::ballot(row >= 0), params.bias,
              token * params.row_bytes + offset, offset, params.sums, vectors);

    // 3. Weights, from the row of the rank that has the expert.
    if (params.weights == nullptr || offset != 0) return;
    const std::int64_t carrier = warp::shuffle(row, last);
    if (lane >= params.num_topk) return;
    const bool told = chosen && carrier >= 0;
    params.weights[at] = told ? load_weak(params.beside + carrier * params.beside_stride + 1 + lane) : 0;
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(sum_returned_rows, deep_ep::device::sum_returned_rows_body)
