// Kernels for primitives_test.cpp, which knows what must come out.
#pragma once

#include "kernels/primitives/launch.hpp"

namespace deep_ep::probes {

struct LineParams {
  int rounds;
  int lines;               ///< of a row
  std::byte* row;          ///< in memory of the device
  std::uint64_t* read;     ///< [1]: warps of block 1 that have read, all rounds
  std::uint64_t* results;  ///< [1]: words that were not what was sent
};

struct NumericParams {
  int count;
  const float* values;
  std::uint16_t* bf16;   ///< [count]
  std::uint32_t* pairs;  ///< [count / 2]
  float* back;           ///< [count], from the pairs
};

}  // namespace deep_ep::probes

DEEP_EP_DECLARE_KERNEL(line_probe, deep_ep::probes::LineParams, 512)
DEEP_EP_DECLARE_KERNEL(numeric_probe, deep_ep::probes::NumericParams, 256)
