// Counting and finding bits in the 32-bit sets that warp::ballot returns.
#pragma once

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE int count_bits(std::uint32_t set) {
#if DEEP_EP_TARGET_CUDA
  return __popc(set);
#else
  return __builtin_popcount(set);
#endif
}

/// Index of the lowest set bit; `set` is not zero.
DEEP_EP_DEVICE int lowest_bit(std::uint32_t set) {
#if DEEP_EP_TARGET_CUDA
  return __ffs(static_cast<int>(set)) - 1;
#else
  return __builtin_ctz(set);
#endif
}

/// Index of the highest set bit; `set` is not zero.
DEEP_EP_DEVICE int highest_bit(std::uint32_t set) {
#if DEEP_EP_TARGET_CUDA
  return 31 - __clz(static_cast<int>(set));
#else
  return 31 - __builtin_clz(set);
#endif
}

/// `work(i)` for each bit i of `set`, from the lowest on.
template <class Work>
DEEP_EP_DEVICE void each_bit(std::uint32_t set, Work work) {
#pragma unroll 1
  for (; set != 0; set &= set - 1) work(lowest_bit(set));
}

}  // namespace deep_ep::device
