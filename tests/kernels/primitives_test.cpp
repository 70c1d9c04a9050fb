// The vocabulary of kernels/primitives on every executor, and on the host under many schedules.
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

TEST(Primitives, WarpOperations) {
  const TestKernel<WarpParams> kernel(DEEP_EP_TEST_LAUNCHERS(warp_probe));
  // The order of additions that warp::sum promises.
  float tree[32];
  for (int i = 0; i < 32; ++i) tree[i] = 1.0f / static_cast<float>(i + 1);
  for (int step = 16; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) tree[i] += tree[i + step];
  }
  on_every_executor([&](Executor& executor) {
    constexpr int kBlocks = 2, kThreads = 96;
    Shared<WarpResult> results(executor, kBlocks * kThreads);
    run(executor, kernel, {kBlocks, kThreads, 0}, {results.data()});
    for (int t = 0; t < kBlocks * kThreads; ++t) {
      const WarpResult& r = results[static_cast<std::size_t>(t)];
      const int lane = t % 32;
      const auto u = static_cast<std::uint32_t>(lane);
      ASSERT_EQ(r.shuffled8, (u + 1) % 32 * 7 % 256) << "lane " << lane;
      ASSERT_EQ(r.shuffled16, (31 - u) * 1000 % 65536) << "lane " << lane;
      ASSERT_EQ(r.shuffled32, 500000u);
      const std::uint64_t source64 = u * 3 % 32;
      ASSERT_EQ(r.shuffled64, (source64 << 40) + source64) << "lane " << lane;
      const std::uint32_t source128 = (u + 16) % 32;
      for (std::uint32_t w = 0; w < 4; ++w) ASSERT_EQ(r.shuffled128.word[w], source128 + w * 100) << "lane " << lane;
      ASSERT_EQ(r.shuffled_up, static_cast<float>(lane < 3 ? lane : lane - 3) + 0.5f) << "lane " << lane;
      ASSERT_EQ(r.shuffled_xor, -(lane ^ 6)) << "lane " << lane;
      ASSERT_EQ(r.ballot, 0x49249249u);
      ASSERT_EQ(r.flags, 15u);
      ASSERT_EQ(r.sum, 31 * 16 - 32 * 20);
      ASSERT_EQ(r.sum64, std::uint64_t{31 * 16} << 33);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(r.float_sum), std::bit_cast<std::uint32_t>(tree[0]));
      ASSERT_EQ(r.max, 77);
      ASSERT_EQ(r.min, -5);
      ASSERT_EQ(r.float_max, 30.0f);
      ASSERT_EQ(r.min64, -(std::int64_t{31} << 35));
      ASSERT_EQ(r.inclusive_sum, lane * (lane + 1) / 2) << "lane " << lane;
      std::uint32_t match = 0;
      for (std::uint32_t other = 0; other < 32; ++other) match |= (other / 5 == u / 5 ? 1u : 0u) << other;
      ASSERT_EQ(r.match, match) << "lane " << lane;
    }
  });
}

TEST(Primitives, Barriers) {
  const TestKernel<BarrierParams> kernel(DEEP_EP_TEST_LAUNCHERS(barrier_probe));
  on_every_executor([&](Executor& executor) {
    constexpr int kThreads = 256, kRounds = 10;
    Shared<std::uint32_t> sums(executor, kThreads);
    run(executor, kernel, {1, kThreads, kThreads * 4}, {kRounds, sums.data()});
    for (std::uint32_t t = 0; t < kThreads; ++t) {
      std::uint32_t want = 0;
      for (std::uint32_t round = 1; round <= kRounds; ++round) {
        want += round * ((t + kThreads / 2) % kThreads + 1) + round * ((t ^ 32) + 1);
        if (t / 32 % 2 == 1) want += round * (t - 32 + 1) + 1;
      }
      ASSERT_EQ(sums[t], want) << "thread " << t;
    }
  });
}

TEST(Primitives, MemoryOrderAndAtomics) {
  const TestKernel<MemoryParams> kernel(DEEP_EP_TEST_LAUNCHERS(memory_probe));
  on_every_executor([&](Executor& executor) {
    constexpr int kBlocks = 6, kThreads = 64, kAll = kBlocks * kThreads;
    Shared<std::uint64_t> counter(executor, 3);
    Shared<std::uint32_t> counter32(executor, 3);
    Shared<std::int64_t> order(executor, 2);
    Shared<device::Vec16> source(executor, kAll), destination(executor, kAll);
    for (std::uint32_t i = 0; i < kAll; ++i) source[i] = {{i, 2 * i, 3 * i, 4 * i}};
    run(executor, kernel, {kBlocks, kThreads, 64},
        {counter.data(), counter32.data(), order.data(), source.data(), destination.data()});
    EXPECT_EQ(counter[0], kAll);
    EXPECT_EQ(counter[1], 2u * kAll);
    EXPECT_EQ(counter[2], std::uint64_t{kBlocks} << 33);
    EXPECT_EQ(counter32[0], 3u * kAll);
    EXPECT_EQ(counter32[1], 4u * kAll);
    EXPECT_EQ(counter32[2], static_cast<std::uint32_t>(kAll));
    EXPECT_EQ(order[0], kBlocks);
    EXPECT_EQ(order[1], 12345);
    for (std::uint32_t i = 0; i < kAll; ++i) {
      ASSERT_EQ(destination[i].word[0], 3 * i);
      ASSERT_EQ(destination[i].word[1], 5 * i);
      ASSERT_EQ(destination[i].word[2], 3 * i);
      ASSERT_EQ(destination[i].word[3], 4 * i + 1);
    }
  });
}

TEST(Primitives, Cells) {
  const TestKernel<CellParams> kernel(DEEP_EP_TEST_LAUNCHERS(cell_probe));
  on_every_executor([&](Executor& executor) {
    constexpr int kRounds = 20;
    Shared<Cell> cells(executor, 32);
    Shared<std::uint64_t> read(executor, 1), results(executor, 32);
    run(executor, kernel, {2, 32, 0}, {kRounds, cells.data(), read.data(), results.data()});
    for (std::uint64_t lane = 0; lane < 32; ++lane) {
      std::uint64_t want = 0;
      for (std::uint64_t epoch = 1; epoch <= kRounds; ++epoch) want += (epoch << 32 | lane) * epoch;
      ASSERT_EQ(results[lane], want) << "lane " << lane;
      ASSERT_EQ(cells[lane].epoch, static_cast<std::uint64_t>(kRounds));
    }
  });
}

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

TEST(Primitives, BulkPipeline) {
  const TestKernel<BulkParams> kernel(DEEP_EP_TEST_LAUNCHERS(bulk_probe));
  on_every_executor([&](Executor& executor) {
    for (const int row_bytes : {16, 512, 4096}) {
      constexpr int kRows = 37, kWarps = 3;
      const auto bytes = static_cast<std::size_t>(kRows * row_bytes);
      Shared<std::byte> source(executor, bytes), destination(executor, bytes);
      for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<std::byte>(i * 31 + i / 256);
      const std::size_t shared = 1024 + static_cast<std::size_t>(kWarps * 2 * row_bytes);
      run(executor, kernel, {2, kWarps * 32, shared}, {kRows, row_bytes, source.data(), destination.data()});
      for (std::size_t i = 0; i < bytes; ++i) {
        ASSERT_EQ(static_cast<unsigned char>(destination[i]), (static_cast<unsigned>(source[i]) + 1) % 256)
            << "byte " << i << " of rows of " << row_bytes;
      }
    }
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
