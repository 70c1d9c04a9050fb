// Steps of the cast from bfloat16 to FP8, by lanes of a warp that have eight channels (a vector) at a time.
#pragma once

#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// The largest magnitude, of bfloat16 bits: those have the same order as the numbers, and NaN is above all.
DEEP_EP_DEVICE std::uint32_t largest_magnitude(const Vec16& value) {
  std::uint32_t amax = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = value.word[i] & 0x7fffu;
    const std::uint32_t high = value.word[i] >> 16 & 0x7fffu;
    amax = low > amax ? low : amax;
    amax = high > amax ? high : amax;
  }
  return amax;
}

/// Of so many neighbouring lanes.
template <int kLanes>
DEEP_EP_DEVICE std::uint32_t largest_of_lanes(std::uint32_t amax) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const std::uint32_t other = warp::shuffle_xor(amax, distance);
    amax = other > amax ? other : amax;
  }
  return amax;
}

/// The eight channels, each as `scaled` makes it, as float8_e4m3, the first in the lowest byte.
template <class Scaled>
DEEP_EP_DEVICE std::uint64_t to_e4m3_by(const Vec16& value, Scaled scaled) {
  std::uint32_t words[2];
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t a = value.word[2 * i];
    const std::uint32_t b = value.word[2 * i + 1];
    words[i] = static_cast<std::uint32_t>(pack_e4m3(scaled(bf16_low(a)), scaled(bf16_high(a)))) |
               static_cast<std::uint32_t>(pack_e4m3(scaled(bf16_low(b)), scaled(bf16_high(b)))) << 16;
  }
  return static_cast<std::uint64_t>(words[1]) << 32 | words[0];
}
DEEP_EP_DEVICE std::uint64_t to_e4m3(const Vec16& value, float multiplier) {
  return to_e4m3_by(value, [multiplier](float channel) { return channel * multiplier; });
}

}  // namespace deep_ep::device
