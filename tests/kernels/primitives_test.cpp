// Tagged lines and numbers of kernels/primitives on every executor. What else is there, every call uses.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/primitives/line.hpp"
#include "tests/kernels/probes/probes.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::probes;

/// A row in the memory of the device, where lines arrive whole.
TEST(Primitives, TaggedLines) {
  const TestKernel<LineParams> kernel(DEEP_EP_TEST_LAUNCHERS(line_probe));
  on_every_executor([&](Executor& executor) {
    const bool gpu = executor.device().kind == Device::Kind::cuda;
    const int rounds = gpu ? 20'000 : 3;
    const int lines = gpu ? 62 : 13;
    const std::size_t bytes = static_cast<std::size_t>(lines) * kTaggedLine;
    executor.make_current();
    auto* row = static_cast<std::byte*>(executor.allocate(bytes + 64));  // the counters lie behind it
    const StreamHandle stream = executor.create_stream();
    executor.fill(row, 0, bytes + 64, stream);
    auto* counters = reinterpret_cast<std::uint64_t*>(row + bytes);
    kernel(executor, stream, {2, gpu ? 512 : 64, 0}, {rounds, lines, row, counters, counters + 1});
    std::uint64_t results[2] = {};
    executor.copy(results, counters, sizeof results, stream);
    executor.synchronize(stream);
    executor.destroy_stream(stream);
    executor.free(row);
    EXPECT_EQ(results[0], static_cast<std::uint64_t>(rounds * (gpu ? 16 : 2)));
    EXPECT_EQ(results[1], 0u);
  });
}

/// bf16 by definition: the nearest value, ties to the one with an even last bit.
std::uint16_t reference_bf16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto down = static_cast<std::uint16_t>(bits >> 16);
  if (std::isinf(value) || (bits & 0xffffu) == 0) return down;
  const std::uint32_t rest = bits & 0xffffu;
  const bool up = rest > 0x8000u || (rest == 0x8000u && (down & 1u) != 0);
  return static_cast<std::uint16_t>(down + (up ? 1 : 0));
}

TEST(Primitives, NumbersAreBitExact) {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               1.0f,
                               -1.0f,
                               1.00390625f,
                               1.01171875f,
                               3.4e38f,
                               -3.4e38f,
                               1e-40f,
                               -1e-45f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               -std::numeric_limits<float>::quiet_NaN(),
                               std::bit_cast<float>(0x7f800001u),
                               std::numeric_limits<float>::max()};
  std::mt19937 random(20240607);
  for (int i = 0; i < 5000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (std::uint32_t i = 0; i < 2000; ++i) {  // around ties
    values.push_back(std::bit_cast<float>((i * 0x20001u << 3 & 0xffff0000u) + 0x7fffu + i % 3));
  }
  const TestKernel<NumericParams> kernel(DEEP_EP_TEST_LAUNCHERS(numeric_probe));
  for (const auto& executor : executors_present()) {
    const std::size_t count = values.size();
    Shared<float> input(*executor, count), back(*executor, count);
    Shared<std::uint16_t> bf16(*executor, count);
    Shared<std::uint32_t> pairs(*executor, count / 2);
    std::copy(values.begin(), values.end(), input.data());
    run(*executor, kernel, {1, 64, 0}, {static_cast<int>(count), input.data(), bf16.data(), pairs.data(), back.data()});
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint16_t want = reference_bf16(values[i]);
      ASSERT_EQ(bf16[i], want) << std::hexfloat << values[i];
      ASSERT_EQ(pairs[i / 2] >> (i % 2 * 16) & 0xffffu, want) << std::hexfloat << values[i];
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]), std::uint32_t{want} << 16);
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
