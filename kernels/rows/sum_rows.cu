// Sums of the rows of the expanded layout that each received row has.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/row_pieces.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void sum_rows_body(const SumRowsParams& params, std::byte* /*shared*/) {
  const RowMetadata& metadata = params.metadata;
  const std::byte* const no_bias[2] = {nullptr, nullptr};
  for_each_piece(metadata.valid(), params.row_bytes, [&](std::int64_t row, std::uint32_t offset, int vectors) {
    const std::int64_t term = lane_index() < metadata.num_topk ? load_weak(metadata.slots(row) + lane_index()) : -1;
    sum_piece(row_address(params.rows, term, params.row_bytes), warp::ballot(term >= 0 && term < params.num_rows),
              no_bias, row * params.row_bytes + offset, offset, params.sums, vectors);
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(sum_rows, deep_ep::device::sum_rows_body)
