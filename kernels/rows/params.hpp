// Arguments of the kernels that add up and move rows within a device's memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_ep {

struct SumRowsParams {
  static constexpr int kMostTerms = 32;  ///< a lane finds one

  const std::byte* rows;  ///< [num_rows] of bfloat16
  std::int64_t num_rows;
  const std::int64_t* index;  ///< [num_sums, terms]: a row; what is none: no term
  const std::byte* bias[2];   ///< [num_sums] rows, nullptr: none
  std::byte* sums;            ///< out, [num_sums] rows
  std::int64_t num_sums;
  int terms;
  std::uint32_t row_bytes;  ///< multiple of 16
};

struct GatherRowsParams {
  const std::byte* rows;
  std::int64_t num_rows;
  const std::int64_t* index;  ///< [num_gathered], see gather_rows()
  std::byte* gathered;        ///< out
  std::int64_t num_gathered;
  std::uint32_t row_bytes;  ///< multiple of unit_bytes
  int unit_bytes;           ///< 16 or 4: what a lane moves at once
};

}  // namespace deep_ep
