#include "oracle/nvfp4.hpp"

#include <algorithm>
#include <cmath>

#include "oracle/bf16.hpp"
#include "oracle/fp8.hpp"

namespace deep_ep::oracle {
namespace {

constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
constexpr float kSixth = 1.0f / 6.0f;

}  // namespace

std::uint8_t e2m1_bits(float value) {
  const std::uint8_t sign = std::signbit(value) ? 8 : 0;
  if (std::isnan(value)) return sign;
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint8_t code = 0;
  for (std::uint8_t next = 1; next < 8; ++next) {
    const double below = magnitude - static_cast<double>(kMagnitudes[code]);
    const double above = static_cast<double>(kMagnitudes[next]) - magnitude;
    if (above < below || (above == below && next % 2 == 0)) code = next;
  }
  return sign | code;
}

std::uint8_t cast_nvfp4(std::span<const std::uint16_t> block, float global_scale, std::span<std::uint8_t> out) {
  float amax = 0;
  for (const std::uint16_t bits : block) amax = std::max(amax, std::fabs(bf16_value(bits)));
  const float sixth = amax * kSixth;
  const std::uint8_t scale = e4m3_bits(sixth * global_scale);
  const float multiplier = scale == 0 ? 0.0f : global_scale / e4m3_value(scale);
  for (std::size_t i = 0; i < block.size(); i += 2) {
    const std::uint8_t low = e2m1_bits(bf16_value(block[i]) * multiplier);
    const std::uint8_t high = e2m1_bits(bf16_value(block[i + 1]) * multiplier);
    out[i / 2] = static_cast<std::uint8_t>(low | high << 4);
  }
  return scale;
}

}  // namespace deep_ep::oracle
