// Sums of rows in this device's memory.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/row_pieces.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void sum_rows_body(const SumRowsParams& params, std::byte* /*shared*/) {
  std::int64_t sums = params.num_sums;
  if (params.num_wanted != nullptr) {
    const std::int64_t wanted = load_weak(params.num_wanted);
    sums = wanted < sums ? wanted : sums;
  }
  for_each_piece(sums, params.row_bytes, [&](std::int64_t row, std::uint32_t offset, int vectors) {
    const std::int64_t term =
        lane_index() < params.terms ? params.index.load_cached(row * params.index_stride + lane_index()) : -1;
    sum_piece(row_address(params.rows, term, params.row_bytes), warp::ballot(term >= 0 && term < params.num_rows),
              params.bias, row * params.row_bytes + offset, offset, params.sums, vectors);
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(sum_rows, deep_ep::device::sum_rows_body)
