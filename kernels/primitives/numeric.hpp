// Number formats, bit-exact on every target: so long as no option of a compiler makes products and quotients inexact.
#pragma once

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

DEEP_EP_HOST_DEVICE constexpr float float_from_bits(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEEP_EP_HOST_DEVICE constexpr std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }

/// The product, rounded: never part of a fused multiply-add.
DEEP_EP_DEVICE float rounded_product(float a, float b) {
#if DEEP_EP_TARGET_CUDA
  return __fmul_rn(a, b);
#else
  volatile float product = a * b;  // compilers may fuse it with an addition otherwise
  return product;
#endif
}

/// Four of the eight bytes of `low` (0 to 3) and `high` (4 to 7): the lowest digit of `bytes` says which is the lowest.
DEEP_EP_DEVICE std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t bytes) {
#if DEEP_EP_TARGET_CUDA
  return __byte_perm(low, high, bytes);
#else
  const std::uint64_t all = std::uint64_t{high} << 32 | low;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<std::uint32_t>(all >> (bytes >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
#endif
}

// Two bf16 in a word, the lower address in the lower half.

DEEP_EP_HOST_DEVICE float bf16_low(std::uint32_t pair) { return float_from_bits(pair << 16); }
DEEP_EP_HOST_DEVICE float bf16_high(std::uint32_t pair) { return float_from_bits(pair & 0xffff0000u); }

/// The magnitudes of both, as bits, which have the order of the numbers: infinity is above all finite ones, NaN above
/// infinity. With `raised` = kBf16RaisesFinite each finite one is larger by that, and the others are below all of
/// these.
constexpr std::uint32_t kBf16RaisesFinite = 0x80;
DEEP_EP_HOST_DEVICE constexpr std::uint32_t bf16_magnitudes(std::uint32_t pair, std::uint32_t raised) {
  return ((pair & 0x7fff7fffu) + (raised << 16 | raised)) & 0x7fff7fffu;
}

/// To nearest, ties to even; overflow gives infinity; every NaN becomes 0x7fff (what cvt.rn.bf16x2.f32 does).
DEEP_EP_DEVICE std::uint32_t pack_bf16(float low, float high) {
#if DEEP_EP_TARGET_CUDA
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto convert = [](float value) -> std::uint32_t {
    const std::uint32_t bits = bits_of(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return convert(low) | convert(high) << 16;
#endif
}

// float8_e4m3 (finite only: no infinities, largest 448).

/// Two values, the lower address in the lower byte. To nearest, ties to even; beyond 448 gives 448; NaN gives 0x7f.
DEEP_EP_DEVICE std::uint16_t pack_e4m3(float low, float high) {
#if DEEP_EP_TARGET_CUDA
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto convert = [](float value) -> std::uint32_t {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    const std::uint32_t sign = bits >> 31 << 7;
    if (magnitude >= bits_of(448.0f)) return sign | 0x7e;
    // Below the smallest normal number, 2^-6, steps are 2^-9: those of floats between 2^14 and 2^15.
    if (magnitude < bits_of(0x1p-6f)) {
      return sign | (bits_of(float_from_bits(magnitude) + 0x1p14f) - bits_of(0x1p14f));
    }
    const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    return sign | ((rounded >> 20) - ((127u - 7u) << 3));
  };
  return static_cast<std::uint16_t>(convert(low) | convert(high) << 8);
#endif
}

/// How 128 channels with this largest magnitude become float8_e4m3: channel * multiplier, and what undoes it.
struct Fp8Scale {
  float multiplier;
  float inverse;  ///< what travels
};

/// The definition that DeepEP's kernels and those who read their output share: amax is at least 1e-4; inverse =
/// amax * fl32(1 / 448) and multiplier = 448 / amax, each rounded once; or, for power-of-two scales, the next power of
/// two from that inverse on. For these amax must be finite: no power of two stands for infinity or NaN.
DEEP_EP_DEVICE Fp8Scale fp8_scale(float amax, bool power_of_two) {
  constexpr float kLargest = 448.0f;
  constexpr float kLargestInverse = 1.0f / 448.0f;
  amax = amax < 1e-4f ? 1e-4f : amax;
  const float inverse = amax * kLargestInverse;
  if (power_of_two) {
    const std::uint32_t bits = bits_of(inverse);
    const std::uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);  // biased
    return {float_from_bits((254u - exponent) << 23), float_from_bits(exponent << 23)};
  }
  return {kLargest / amax, inverse};
}

/// The definition of quantisers for training: amax is at least 1e-10; amax / 448 travels, and a channel is cast as
/// channel / that, each rounded once.
DEEP_EP_DEVICE float aligned_fp8_scale(float amax) { return (amax < 1e-10f ? 1e-10f : amax) / 448.0f; }

// float4 e2m1 and NVFP4: blocks of 16 channels with an e4m3 scale each, and one float32 scale for all of them.

/// To nearest, ties to even, of 0, 0.5, 1, 1.5, 2, 3, 4, 6; beyond 6 gives 6; the sign in bit 3, also that of zero; NaN
/// gives 0 with its sign.
DEEP_EP_HOST_DEVICE std::uint32_t e2m1(float value) {
  const std::uint32_t bits = bits_of(value);
  const float magnitude = float_from_bits(bits & 0x7fffffffu);
  const auto passed = [](bool is) { return is ? 1u : 0u; };
  return (bits >> 31 << 3) |
         (passed(magnitude > 0.25f) + passed(magnitude >= 0.75f) + passed(magnitude > 1.25f) +
          passed(magnitude >= 1.75f) + passed(magnitude > 2.5f) + passed(magnitude >= 3.5f) + passed(magnitude > 5.0f));
}

/// How 16 channels with this largest magnitude become e2m1: channel * multiplier, and the scale that travels.
struct Nvfp4Scale {
  float multiplier;
  std::uint32_t e4m3;
};

/// A channel is about value * scale / global. The scale is e4m3(amax * fl32(1 / 6) * global), each product rounded;
/// multiplier = global / scale, rounded once, or 0 where the scale is 0.
DEEP_EP_DEVICE Nvfp4Scale nvfp4_scale(float amax, float global) {
  constexpr float kLargestInverse = 1.0f / 6.0f;
  const float wanted = amax * kLargestInverse * global;
  const std::uint32_t scale = pack_e4m3(wanted, 0.0f) & 0xffu;
  if (scale == 0) return {0.0f, 0};
  const float value = scale == 0x7f ? float_from_bits(0x7fffffffu)
                      : scale < 8   ? static_cast<float>(scale) * 0x1p-9f
                                    : float_from_bits((scale + (120u << 3)) << 20);
  return {global / value, scale};
}

}  // namespace deep_ep::device
