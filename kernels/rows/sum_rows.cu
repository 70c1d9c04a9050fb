// Sums of rows in this device's memory: a warp adds a piece of a row, in fp32, its terms in their order. Pieces and not
// rows, so that a few rows keep the whole device busy, too.
#include "kernels/common/row_sum.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void sum_rows_body(const SumRowsParams& params, std::byte* /*shared*/) {
  const std::int64_t pieces = (params.row_bytes + RowSum::kPieceBytes - 1) / RowSum::kPieceBytes;
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  for (std::int64_t unit = std::int64_t{block_index()} * block_warps() + warp_index(); unit < params.num_sums * pieces;
       unit += warps) {
    const std::int64_t row = unit / pieces;
    const auto offset = static_cast<std::uint32_t>(unit % pieces) * RowSum::kPieceBytes;
    const std::uint32_t rest = params.row_bytes - offset;
    const int vectors = static_cast<int>((rest < RowSum::kPieceBytes ? rest : RowSum::kPieceBytes) / sizeof(Vec16));
    const std::int64_t term =
        lane_index() < params.terms ? load_weak(params.index + row * params.terms + lane_index()) : -1;
    const std::uint32_t found = warp::ballot(term >= 0 && term < params.num_rows);

    RowSum sum;
    const bool any = found != 0 || params.bias[0] != nullptr || params.bias[1] != nullptr;
    // x + -0.0 is x for every x, which +0.0 is not. Where there is nothing to add, the sum is +0.0.
    if (any) sum.begin_with(-0.0f);
    for (const std::byte* bias : params.bias) {
      if (bias != nullptr) sum.add_stream(bias + row * params.row_bytes + offset, vectors);
    }
    sum.add_rows(reinterpret_cast<std::uint64_t>(params.rows + term * params.row_bytes), found, offset, vectors);
    sum.store(params.sums + row * params.row_bytes + offset, vectors);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(sum_rows, deep_ep::device::sum_rows_body)
