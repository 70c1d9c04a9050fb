// Sums of rows, each of the rows that the lanes of a warp find: those of the expanded layout that a received row has,
// or those that came back for a token.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/row_pieces.hpp"

namespace deep_ep::device {

/// By a whole warp: the row that came back for each lane's selection of `token`, -1 for none; and the token's weights.
DEEP_EP_DEVICE std::int64_t returned_row(const SumRowsParams& params, std::int64_t num_rows, std::int64_t token,
                                         bool with_weights) {
  const ReturnedRows& back = params.returned;
  // 1. A lane for each selection: does the rank that has its expert come last with it?
  const int lane = lane_index();
  const std::int64_t at = token * back.num_topk + lane;
  const std::int64_t index = lane < back.num_topk ? back.topk_idx.load_cached(at) : -1;
  const bool chosen = index >= 0;
  // Lanes without a selection are alone with their number, which no rank has.
  const auto owner = static_cast<std::uint32_t>(chosen ? index / back.num_experts : -1 - lane);
  const int last = highest_bit(warp::match_any(owner));

  // 2. Which row came for it? The row must say the same.
  std::int64_t row = -1;
  if (chosen && (back.each_selection || last == lane)) {
    row = load_weak(back.row_of + at);
    if (row < 0 || row >= num_rows || load_weak(back.beside + row * back.beside_stride) != at) row = -1;
  }

  // 3. Weights, from the row of the rank that has the expert.
  if (back.weights == nullptr || !with_weights) return row;
  const std::int64_t carrier = warp::shuffle(row, last);
  if (lane >= back.num_topk) return row;
  const bool told = chosen && carrier >= 0;
  back.weights[at] = told ? load_weak(back.beside + carrier * back.beside_stride + 1 + lane) : 0;
  return row;
}

DEEP_EP_DEVICE void sum_rows_body(const SumRowsParams& params, std::byte* /*shared*/) {
  if (load_relaxed<Scope::gpu>(params.abort) != 0) return;  // what would say which rows to add is not there
  const RowMetadata& metadata = params.metadata;
  const bool of_layout = params.returned.beside == nullptr;
  const std::int64_t num_rows = params.rows_there();
  for_each_piece(of_layout ? metadata.valid() : params.returned.num_tokens, params.row_bytes,
                 [&](std::int64_t sum, std::uint32_t offset, int vectors) {
                   std::int64_t row = -1;
                   if (!of_layout) {
                     row = returned_row(params, num_rows, sum, offset == 0);
                   } else if (lane_index() < metadata.num_topk) {
                     row = load_weak(metadata.slots(sum) + lane_index());
                   }
                   sum_piece(row_address(params.rows, row, params.row_bytes), warp::ballot(row >= 0 && row < num_rows),
                             params.bias, sum * params.row_bytes + offset, offset, params.sums, vectors);
                 });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(sum_rows, deep_ep::device::sum_rows_body)
