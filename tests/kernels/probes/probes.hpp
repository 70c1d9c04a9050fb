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

}  // namespace deep_ep::probes

DEEP_EP_DECLARE_KERNEL(line_probe, deep_ep::probes::LineParams, 512)
