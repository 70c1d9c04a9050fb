// The cast to 8-bit floating point; fp8_test.cpp knows what must come out.
#pragma once

#include "kernels/primitives/launch.hpp"

namespace deep_ep::probes {

struct Fp8Params {
  int count;  ///< even
  const float* values;
  std::uint16_t* pairs;  ///< [count / 2]: two values as e4m3
  /// [count]: of the magnitude of each value as the largest of a block
  float *multiplier, *inverse, *rounded_multiplier, *rounded_inverse, *aligned;
};

}  // namespace deep_ep::probes

DEEP_EP_DECLARE_KERNEL(fp8_probe, deep_ep::probes::Fp8Params, 256)
