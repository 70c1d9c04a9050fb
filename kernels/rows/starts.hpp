// Where the rows of each expert begin.
#pragma once

#include <cstdint>

#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE std::int32_t rounded_up(std::int32_t count, int alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

/// By one warp: each expert's rows begin behind those of the experts before, rounded up.
DEEP_EP_DEVICE void find_starts(const std::int32_t* counts, int num_experts, int alignment, std::int32_t* starts) {
  std::int32_t start = 0;
  for (int first = 0; first < num_experts; first += kWarpSize) {
    const int expert = first + lane_index();
    const std::int32_t rows = expert < num_experts ? rounded_up(counts[expert], alignment) : 0;
    const std::int32_t end = start + warp::inclusive_sum(rows);
    if (expert < num_experts) starts[expert] = end - rows;
    start = warp::shuffle(end, kWarpSize - 1);
  }
}

}  // namespace deep_ep::device
