// The codes of LogFMT-10, by the kernels' own functions.
#include "kernels/low_latency/combine/logfmt.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "oracle/bf16.hpp"

namespace deep_ep::device::logfmt {
namespace {

Magnitudes from_to(float smallest, float largest) {
  return {.largest = oracle::bf16_bits(largest), .smallest = oracle::bf16_bits(smallest)};
}

TEST(Logfmt, ARangeHasThirtyTwoOctavesAtMost) {
  EXPECT_NEAR(Range(from_to(1e-5f, 0.5f)).low, std::log2(1e-5), 0.01);
  EXPECT_NEAR(Range(from_to(1e-20f, 0.5f)).low, -33, 1e-4);
  EXPECT_NEAR(Range(from_to(0.0f, 0.5f)).low, -33, 1e-4);
}

TEST(Logfmt, CodesAreTheNearestOnes) {
  const Magnitudes all = from_to(1e-9f, 0.75f);
  const Range range(all);
  const Encoder encoder(range);
  for (std::uint32_t bits = all.smallest; bits <= all.largest; ++bits) {
    const double value = static_cast<double>(oracle::bf16_value(static_cast<std::uint16_t>(bits)));
    const auto distance = [&](std::uint32_t code) {
      return std::abs(static_cast<double>(decode(code, range)) - value);
    };
    const std::uint32_t code = encoder.encode(bits);
    for (const std::uint32_t other : {code - 1, code + 1}) {
      if (other < 1 || other > static_cast<std::uint32_t>(kLargestCode)) continue;
      ASSERT_LE(distance(code), distance(other) + value * 1e-5) << bits << " becomes " << code << ", not " << other;
    }
  }
}

}  // namespace
}  // namespace deep_ep::device::logfmt
