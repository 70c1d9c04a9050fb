// bfloat16, in plain code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace deep_ep::oracle {

inline float bf16_value(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

/// Round to nearest, ties to even; NaN becomes 0x7fff.
inline std::uint16_t bf16_bits(float value) {
  if (std::isnan(value)) return 0x7fff;
  const auto wide = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t kept = wide >> 16;
  const std::uint32_t dropped = wide & 0xffffu;
  const bool up = dropped > 0x8000u || (dropped == 0x8000u && (kept & 1u) != 0);
  return static_cast<std::uint16_t>(kept + (up ? 1u : 0u));
}

}  // namespace deep_ep::oracle
