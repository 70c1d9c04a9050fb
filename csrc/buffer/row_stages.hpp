// How a warp cuts rows into stages of its part of shared memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/common/limits.hpp"

namespace deep_ep {

struct RowStages {
  int count;
  std::uint32_t bytes;  ///< of each

  /// As many whole rows as fit, from two to eight. Rows too long for two are cut into pieces.
  static RowStages make(std::size_t bytes_of_warp, std::size_t row_bytes) {
    const std::size_t row = align_to_line(row_bytes);
    return {static_cast<int>(std::clamp<std::size_t>(bytes_of_warp / row, 2, kMost)),
            static_cast<std::uint32_t>(std::min(row, bytes_of_warp / 2 / kLine * kLine))};
  }
  static constexpr int kMost = 8;
};

}  // namespace deep_ep
