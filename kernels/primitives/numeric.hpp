// Number formats, bit-exact on every target.
#pragma once

#include <cstring>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

DEEP_EP_HOST_DEVICE float float_from_bits(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

DEEP_EP_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// Exact.
DEEP_EP_HOST_DEVICE float bf16_to_float(std::uint16_t value) {
  return float_from_bits(static_cast<std::uint32_t>(value) << 16);
}

/// To nearest, ties to even; overflow gives infinity; every NaN becomes 0x7fff (what cvt.rn.bf16.f32 does).
DEEP_EP_DEVICE std::uint16_t float_to_bf16(float value) {
#if DEEP_EP_TARGET_CUDA
  std::uint16_t result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Two bf16 in a word, the lower address in the lower half.

DEEP_EP_HOST_DEVICE float bf16_low(std::uint32_t pair) { return float_from_bits(pair << 16); }
DEEP_EP_HOST_DEVICE float bf16_high(std::uint32_t pair) { return float_from_bits(pair & 0xffff0000u); }

DEEP_EP_DEVICE std::uint32_t pack_bf16(float low, float high) {
#if DEEP_EP_TARGET_CUDA
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<std::uint32_t>(float_to_bf16(low)) | static_cast<std::uint32_t>(float_to_bf16(high)) << 16;
#endif
}

}  // namespace deep_ep::device
