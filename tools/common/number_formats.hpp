// BF16, 8-bit floats and a hash for the command's own models. Plain code: it checks the kernels, so it shares nothing
// with them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace deep_ep::tools {

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

/// Round to nearest even; the values here are finite.
inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// FP8 e4m3 (finite values, largest 448), round to nearest even, saturating.
inline std::uint8_t float_to_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const float magnitude = std::fabs(value);
  std::uint32_t code = 0;
  if (magnitude < 0x1p-6f) {
    code = static_cast<std::uint32_t>(std::nearbyint(magnitude * 512.0f));  // subnormals count in steps of 2^-9
  } else {
    const auto positive = std::bit_cast<std::uint32_t>(magnitude);
    const std::uint32_t rounded = positive + 0x7ffffu + ((positive >> 20) & 1u);
    code = (rounded >> 20) - ((127u - 7u) << 3);
  }
  return static_cast<std::uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

/// splitmix64: a well-mixed 64-bit value for every input.
inline std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return mix(mix(a) ^ b); }

/// Uniform in [-1, 1).
inline float to_unit(std::uint64_t hash) {
  return static_cast<float>(static_cast<std::int64_t>(hash >> 40)) * 0x1p-23f - 1.0f;
}

}  // namespace deep_ep::tools
