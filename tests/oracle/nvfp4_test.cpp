// NVFP4 by hand, and the kernels' conversion against the oracle's: every tie, and what lies beside it.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/primitives/numeric.hpp"
#include "oracle/bf16.hpp"
#include "oracle/fp8.hpp"
#include "oracle/nvfp4.hpp"

namespace deep_ep::oracle {
namespace {

TEST(OracleNvfp4, CodesByHand) {
  EXPECT_EQ(e2m1_bits(0.0f), 0);
  EXPECT_EQ(e2m1_bits(-0.0f), 8);
  EXPECT_EQ(e2m1_bits(0.25f), 0) << "half-way to 0.5: even is 0";
  EXPECT_EQ(e2m1_bits(0.75f), 2) << "half-way from 0.5 to 1: even is 1";
  EXPECT_EQ(e2m1_bits(-1.75f), 8 + 4) << "half-way from 1.5 to 2: even is 2";
  EXPECT_EQ(e2m1_bits(5.0f), 6) << "half-way from 4 to 6: even is 4";
  EXPECT_EQ(e2m1_bits(100.0f), 7);
  for (std::uint8_t bits = 0; bits < 16; ++bits) EXPECT_EQ(e2m1_bits(e2m1_value(bits)), bits);
}

TEST(OracleNvfp4, ABlockByHand) {
  std::vector<std::uint16_t> block(16, bf16_bits(0.0f));
  block[0] = bf16_bits(12.0f);
  block[1] = bf16_bits(-6.0f);
  block[15] = bf16_bits(1.0f);
  std::array<std::uint8_t, 8> codes{};
  // 12 / 6 * 2 = 4 is the scale; 12 * 2 / 4 = 6, -6 * 2 / 4 = -3, 1 * 2 / 4 = 0.5.
  EXPECT_EQ(cast_nvfp4(block, 2.0f, codes), e4m3_bits(4.0f));
  EXPECT_EQ(codes[0], 0x7 | (0x8 + 5) << 4);
  EXPECT_EQ(codes[7], 1 << 4);
  const std::vector<std::uint16_t> zeros(16, bf16_bits(-0.0f));
  EXPECT_EQ(cast_nvfp4(zeros, 2.0f, codes), 0);
  EXPECT_EQ(codes[3], 0x88) << "zeros keep their sign";
}

TEST(OracleNvfp4, KernelsCastTheSame) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {kInfinity, std::numeric_limits<float>::quiet_NaN(), 1e-30f, 1e30f};
  for (int quarter = 0; quarter < 40; ++quarter) {
    const float value = static_cast<float>(quarter) / 4;
    values.insert(values.end(), {value, std::nextafterf(value, 0.0f), std::nextafterf(value, kInfinity)});
  }
  for (const float value : values) {
    EXPECT_EQ(device::e2m1(value), e2m1_bits(value)) << value;
    EXPECT_EQ(device::e2m1(-value), e2m1_bits(-value)) << -value;
  }
  // Every magnitude of bfloat16 as the largest of a block.
  for (const float global : {1.0f, 40.5f, 1e-3f, 2688.0f}) {
    for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
      std::vector<std::uint16_t> block(16, static_cast<std::uint16_t>(bits));
      block[1] = bf16_bits(bf16_value(block[0]) * 0.3f);
      std::array<std::uint8_t, 8> codes{};
      const std::uint8_t scale = cast_nvfp4(block, global, codes);
      const device::Nvfp4Scale made = device::nvfp4_scale(bf16_value(block[0]), global);
      ASSERT_EQ(made.e4m3, scale) << "magnitude " << bits << ", global " << global;
      ASSERT_EQ(device::e2m1(bf16_value(block[0]) * made.multiplier) |
                    device::e2m1(bf16_value(block[1]) * made.multiplier) << 4,
                codes[0])
          << "magnitude " << bits << ", global " << global;
    }
  }
}

}  // namespace
}  // namespace deep_ep::oracle
