// 8-bit floating point, and the cast of 128 channels with a common scale as the low-latency dispatch defines it.
#pragma once

#include <cstdint>
#include <span>

namespace deep_ep::oracle {

inline constexpr int kFp8Block = 128;

/// float8 e4m3 without infinities (largest 448): round to nearest, ties to even; saturates. NaN becomes 0x7f.
std::uint8_t e4m3_bits(float value);
float e4m3_value(std::uint8_t bits);

/// Casts bfloat16 values, usually kFp8Block, to `out` and returns the scale: value ~ out * scale. With amax the largest
/// magnitude, at least 1e-4: scale = amax / 448, where an infinity or a NaN makes the scale one; or, with
/// `round_scale`, the smallest power of two that is not less than that for the largest finite magnitude, so that an
/// infinity becomes 448 * scale with its sign, and a NaN stays alone.
float cast_fp8(std::span<const std::uint16_t> block, bool round_scale, std::span<std::uint8_t> out);

/// As quantisers for training define it: amax is at least 1e-10, scale = amax / 448, and each value is divided by it.
float cast_fp8_aligned(std::span<const std::uint16_t> block, std::span<std::uint8_t> out);

/// The biased exponent of a scale that is a power of two: UE8M0.
std::uint8_t ue8m0_bits(float power_of_two);

}  // namespace deep_ep::oracle
