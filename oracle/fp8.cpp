#include "oracle/fp8.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "oracle/bf16.hpp"

namespace deep_ep::oracle {
namespace {

constexpr float kLargest = 448.0f;
constexpr float kInverse = 1.0f / 448.0f;
constexpr float kSmallestAmax = 1e-4f;

/// NaN if there is one: std::max returns the first argument if that is NaN.
float largest_magnitude(std::span<const std::uint16_t> block, float least) {
  for (const std::uint16_t bits : block) {
    const float magnitude = std::fabs(bf16_value(bits));
    least = std::isnan(magnitude) ? magnitude : std::max(least, magnitude);
  }
  return least;
}

/// The power of two not less than a positive normal number, from its bits.
int ceil_log2(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);
}

}  // namespace

std::uint8_t e4m3_bits(float value) {
  if (std::isnan(value)) return 0x7f;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= static_cast<double>(kLargest)) return sign | 0x7e;
  // Steps of 2^-9 below 2^-6, then 8 steps an octave.
  const int exponent = magnitude < 0x1p-6 ? -6 : std::ilogb(magnitude);
  const double steps = std::nearbyint(std::ldexp(magnitude, 3 - exponent));  // exact but for this rounding
  const int normal = exponent == -6 && steps < 8 ? 0 : exponent + 7;
  // Rounding up to the next octave carries from the mantissa into the exponent by itself.
  const int code = normal == 0 ? static_cast<int>(steps) : (normal << 3) + static_cast<int>(steps) - 8;
  return static_cast<std::uint8_t>(sign | std::min(code, 0x7e));
}

float e4m3_value(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::nanf("");
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

float cast_fp8(std::span<const std::uint16_t> block, bool round_scale, std::span<std::uint8_t> out) {
  std::vector<std::uint16_t> counted(block.begin(), block.end());
  if (round_scale) std::erase_if(counted, [](std::uint16_t bits) { return !std::isfinite(bf16_value(bits)); });
  const float amax = largest_magnitude(counted, kSmallestAmax);
  float scale = amax * kInverse;
  float multiplier = kLargest / amax;
  if (round_scale) {
    const int exponent = ceil_log2(scale);
    scale = std::ldexp(1.0f, exponent);
    multiplier = std::ldexp(1.0f, -exponent);
  }
  for (std::size_t i = 0; i < block.size(); ++i) out[i] = e4m3_bits(bf16_value(block[i]) * multiplier);
  return scale;
}

float cast_fp8_aligned(std::span<const std::uint16_t> block, std::span<std::uint8_t> out) {
  const float scale = largest_magnitude(block, 1e-10f) / kLargest;
  for (std::size_t i = 0; i < block.size(); ++i) out[i] = e4m3_bits(bf16_value(block[i]) / scale);
  return scale;
}

std::uint8_t ue8m0_bits(float power_of_two) {
  const auto bits = std::bit_cast<std::uint32_t>(power_of_two);
  if ((bits & 0x807fffffu) != 0) throw std::invalid_argument("oracle: UE8M0 of what is no positive power of two");
  return static_cast<std::uint8_t>(bits >> 23);
}

}  // namespace deep_ep::oracle
