// What kernels that add up rows have in common: a warp adds a piece of a row, in fp32, its terms in their order. Pieces
// and not rows, so that a few rows keep the whole device busy, too.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// By all warps of the grid: `work(row, offset, vectors)` for every piece of `num_rows` rows.
template <class Work>
DEEP_EP_DEVICE void for_each_piece(std::int64_t num_rows, std::uint32_t row_bytes, Work work) {
  const std::int64_t pieces = (row_bytes + RowSum::kPieceBytes - 1) / RowSum::kPieceBytes;
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  for (std::int64_t unit = std::int64_t{block_index()} * block_warps() + warp_index(); unit < num_rows * pieces;
       unit += warps) {
    const std::int64_t row = unit / pieces;
    const auto offset = static_cast<std::uint32_t>(unit % pieces) * RowSum::kPieceBytes;
    work(row, offset, RowSum::vectors_at(offset, row_bytes));
  }
}

/// By a whole warp: one piece of a sum, `at` bytes into `sums` and the biases: biases, then the rows that the lanes of
/// `found` have the addresses of, by lane, each from `offset` bytes behind its `row` on.
DEEP_EP_DEVICE void sum_piece(std::uint64_t row, std::uint32_t found, const std::byte* const (&bias)[2],
                              std::int64_t at, std::uint32_t offset, std::byte* sums, int vectors) {
  RowSum sum;
  // x + -0.0 is x for every x, which +0.0 is not. Where there is nothing to add, the sum is +0.0.
  if (found != 0 || bias[0] != nullptr || bias[1] != nullptr) sum.begin_with(-0.0f);
  for (const std::byte* each : bias) {
    if (each != nullptr) sum.add_stream(each + at, vectors);
  }
  sum.add_rows(row, found, offset, vectors);
  sum.store(sums + at, vectors);
}

/// Row `number` from `rows` on; as a number, because a lane may have none.
DEEP_EP_DEVICE std::uint64_t row_address(const std::byte* rows, std::int64_t number, std::uint32_t row_bytes) {
  return reinterpret_cast<std::uint64_t>(rows) + static_cast<std::uint64_t>(number) * row_bytes;
}

}  // namespace deep_ep::device
