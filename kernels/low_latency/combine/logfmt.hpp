// LogFMT-10: bfloat16 rows in ten bits per channel, a sign and the logarithm of the magnitude in 511 steps. Lossy.
//
// 128 channels (a group) share a range, from their largest magnitude `a` down to their smallest, or to 2^-32 a where
// that is higher. Code 0 is zero, code c = 1 .. 511 is 2^(low + (c - 1) step). A chunk of 1024 channels (512 where the
// hidden size is no multiple of 1024) is encoded only if that pays in all of its groups: magnitudes below 1, and not
// all the same. Otherwise it travels as it is.
//
// The range travels as the two magnitudes it follows from, so both sides compute the same steps, and both see from
// them alone whether the chunk was encoded.
#pragma once

#include "kernels/primitives/exponential.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep::device::logfmt {

inline constexpr int kGroup = 128;           ///< channels that share a range
inline constexpr int kUnit = 16;             ///< channels that are packed together ...
inline constexpr int kUnitWords = 5;         ///< ... into so many 32-bit words
inline constexpr std::uint32_t kSign = 512;  ///< bit of a code
inline constexpr float kLargestCode = 511;

/// Channels of a chunk: 1024, or 512 where the rows do not consist of such chunks.
DEEP_EP_HOST_DEVICE constexpr int chunk_channels(std::int64_t hidden) { return hidden % 1024 == 0 ? 1024 : 512; }

/// The magnitudes of a group as bfloat16 bits without sign, whose order is that of the numbers (NaN above all).
struct Magnitudes {
  std::uint32_t largest = 0;
  std::uint32_t smallest = 0x7fff;

  DEEP_EP_HOST_DEVICE void include(std::uint32_t bf16_bits) {
    const std::uint32_t magnitude = bf16_bits & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
    smallest = magnitude < smallest ? magnitude : smallest;
  }
  DEEP_EP_HOST_DEVICE std::uint32_t packed() const { return largest << 16 | smallest; }
  DEEP_EP_HOST_DEVICE static Magnitudes unpack(std::uint32_t packed) { return {packed >> 16, packed & 0xffffu}; }
};

/// What codes of a group mean.
struct Range {
  float low;   ///< logarithm of code 1
  float step;  ///< between two codes
  bool pays;   ///< the group may be encoded

  DEEP_EP_DEVICE explicit Range(const Magnitudes& magnitudes) {
    const float high = approximate_log2(bf16_to_float(static_cast<std::uint16_t>(magnitudes.largest)));
    const float smallest = approximate_log2(bf16_to_float(static_cast<std::uint16_t>(magnitudes.smallest)));
    low = smallest > high - 32.0f ? smallest : high - 32.0f;
    step = (high - low) * (1.0f / 510.0f);
    pays = high < 0.0f && low < high;  // false too for NaN, and for a group of zeros (-inf)
  }
};

/// Encodes the channels of a group.
struct Encoder {
  float low, steps_per_octave, offset;

  /// `offset` makes the cut between two codes the middle of their values rather than of their logarithms: the first
  /// terms of 2 - log2((1 + 2^step) / 2) / step, exact to 1e-6 for every possible step (at most 32 / 510).
  DEEP_EP_DEVICE explicit Encoder(const Range& range)
      : low(range.low), steps_per_octave(1.0f / range.step), offset(1.5f - range.step * (0.69314718f / 8.0f)) {}

  DEEP_EP_DEVICE std::uint32_t encode(std::uint32_t bf16_bits) const {
    const float logarithm = approximate_log2(bf16_to_float(static_cast<std::uint16_t>(bf16_bits & 0x7fffu)));
    const float code = (logarithm - low) * steps_per_octave + offset;  // -inf for 0
    const float bounded = code < 0.0f ? 0.0f : code > kLargestCode ? kLargestCode : code;
    return static_cast<std::uint32_t>(bounded) | (bf16_bits & 0x8000u) >> 6;
  }
};

DEEP_EP_DEVICE float decode(std::uint32_t code, const Range& range) {
  const std::uint32_t step = code & (kSign - 1);
  const float magnitude =
      step == 0 ? 0.0f : approximate_exp2(range.low + static_cast<float>(static_cast<int>(step) - 1) * range.step);
  return (code & kSign) != 0 ? -magnitude : magnitude;
}

/// Puts the codes of a unit's channels, in turn, into its words. `kIndex` is the channel's in the unit; words begin
/// with zeros.
DEEP_EP_HOST_DEVICE constexpr void pack(std::uint32_t (&words)[kUnitWords], int index, std::uint32_t code) {
  const int bit = index * 10;
  words[bit / 32] |= code << (bit % 32);
  if (bit % 32 > 22) words[bit / 32 + 1] |= code >> (32 - bit % 32);
}

/// The code of channel `index` of the unit.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t unpack(const std::uint32_t* words, int index) {
  const int bit = index * 10;
  std::uint32_t code = words[bit / 32] >> (bit % 32);
  if (bit % 32 > 22) code |= words[bit / 32 + 1] << (32 - bit % 32);
  return code & 1023u;
}

}  // namespace deep_ep::device::logfmt
