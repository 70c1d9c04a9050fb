// The cast to 8-bit floating point, bit for bit, on every executor.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "oracle/fp8.hpp"
#include "tests/kernels/probes/fp8_probe.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

std::vector<float> values_to_cast() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {
      0.0f,   -0.0f,   448.0f,  449.0f,   463.9f,    464.0f,     480.0f,
      -1e30f, 0x1p-6f, 0x1p-9f, 0x1p-10f, kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()};
  // Every e4m3 value, what lies half-way to the next one, and a little to both sides of that.
  for (int bits = 0; bits < 0x7e; ++bits) {
    const float low = oracle::e4m3_value(static_cast<std::uint8_t>(bits));
    const float tie = (low + oracle::e4m3_value(static_cast<std::uint8_t>(bits + 1))) / 2;
    for (const float value : {low, tie, std::nextafterf(tie, 0.0f), std::nextafterf(tie, kInfinity)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 4000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  return values;
}

TEST(Fp8, CastAndScalesAreBitExact) {
  const std::vector<float> values = values_to_cast();
  const std::size_t count = values.size();
  ASSERT_EQ(count % 2, 0u);
  const TestKernel<probes::Fp8Params> kernel(DEEP_EP_TEST_LAUNCHERS(fp8_probe));
  for (const auto& executor : executors_present()) {
    SCOPED_TRACE(to_string(executor->device()));
    Shared<float> input(*executor, count), multiplier(*executor, count), inverse(*executor, count),
        rounded_multiplier(*executor, count), rounded_inverse(*executor, count), aligned(*executor, count);
    Shared<std::uint16_t> pairs(*executor, count / 2);
    std::copy(values.begin(), values.end(), input.data());
    const StreamHandle stream = executor->create_stream();
    kernel(*executor, stream, {1, 128, 0},
           {static_cast<int>(count), input.data(), pairs.data(), multiplier.data(), inverse.data(),
            rounded_multiplier.data(), rounded_inverse.data(), aligned.data()});
    executor->synchronize(stream);
    executor->destroy_stream(stream);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(pairs[i / 2] >> (i % 2 * 8) & 0xff, oracle::e4m3_bits(values[i])) << std::hexfloat << values[i];
      // bfloat16 cannot hold more than this.
      if (!(std::fabs(values[i]) < 3.39e38f)) continue;
      const float amax = std::fmax(std::fabs(values[i]), 1e-4f);
      ASSERT_EQ(inverse[i], static_cast<float>(static_cast<double>(amax) * static_cast<double>(1.0f / 448.0f)));
      const double floored = std::fmax(std::fabs(values[i]), 1e-10f);
      ASSERT_EQ(aligned[i], static_cast<float>(floored / 448.0)) << std::hexfloat << values[i];
      ASSERT_EQ(multiplier[i], static_cast<float>(448.0 / static_cast<double>(amax))) << std::hexfloat << amax;
      const int exponent = static_cast<int>(std::ceil(std::log2(static_cast<double>(inverse[i]))));
      ASSERT_EQ(rounded_inverse[i], std::ldexp(1.0f, exponent)) << std::hexfloat << amax;
      ASSERT_EQ(rounded_multiplier[i], std::ldexp(1.0f, -exponent)) << std::hexfloat << amax;
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
