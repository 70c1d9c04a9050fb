// Logarithm and power of two, as fast as the processor computes them: off by a few units in the last place, and not
// with the same bits on every target. For formats that only need to be decoded by whoever knows the same parameters.
#pragma once

#include <cmath>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

/// log2(value): -inf for 0, NaN for NaN and negative values. Off by at most 2^-20 for values near 1.
DEEP_EP_DEVICE float approximate_log2(float value) {
#if DEEP_EP_TARGET_CUDA
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  return std::log2(value);
#endif
}

/// 2^value, with a relative error of at most 2^-21; tiny results may be flushed to 0.
DEEP_EP_DEVICE float approximate_exp2(float value) {
#if DEEP_EP_TARGET_CUDA
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  return std::exp2(value);
#endif
}

}  // namespace deep_ep::device
