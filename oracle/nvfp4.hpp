// NVFP4: 4-bit floating point (e2m1) in blocks of 16 channels, an e4m3 scale for each, a float32 scale for all.
#pragma once

#include <cstdint>
#include <span>

namespace deep_ep::oracle {

inline constexpr int kNvfp4Block = 16;

/// float4 e2m1: round to nearest, ties to even; saturates at 6. NaN becomes 0. The sign is always kept.
std::uint8_t e2m1_bits(float value);

/// Casts kNvfp4Block bfloat16 values to as many codes, two in a byte, the first in the lower half, and returns the
/// scale, e4m3 bits: value ~ code * scale / global_scale. scale = e4m3(amax * fl(1 / 6) * global_scale).
std::uint8_t cast_nvfp4(std::span<const std::uint16_t> block, float global_scale, std::span<std::uint8_t> out);

}  // namespace deep_ep::oracle
