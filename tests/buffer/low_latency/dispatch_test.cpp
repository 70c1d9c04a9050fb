// Low-latency dispatch against the oracle: shapes, layouts, formats, schedules, long runs.
#include <algorithm>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {
namespace {

using oracle::Routing;
using oracle::RowFormat;

class LowLatencyDispatchTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyDispatchTest);

void run_all(const ClusterOptions& options, const std::vector<LowLatencyCaseShape>& shapes,
             const std::vector<int>& sms = {0}) {
  std::vector<LowLatencyCase> cases;
  for (const LowLatencyCaseShape& shape : shapes) cases.push_back(make_low_latency_case(shape));
  run_dispatches(options, cases, sms);
}

LowLatencyCaseShape equal_shape(int ranks, std::int64_t tokens) {
  return {.tokens = equal_tokens(ranks, tokens), .max_tokens = tokens};
}

TEST_P(LowLatencyDispatchTest, EveryFormat) {
  std::vector<LowLatencyCaseShape> shapes;
  for (const RowFormat format : oracle::kRowFormats) {
    for (const DType idx_dtype : {DType::int64, DType::int32}) {
      LowLatencyCaseShape shape = equal_shape(2, 5);
      shape.hidden = 1024;
      shape.format = format;
      shape.idx_dtype = idx_dtype;
      shape.seed = shapes.size() + 1;
      shapes.push_back(shape);
    }
  }
  run_all(cluster(2), shapes);
}

/// Beside numbers of every size, in blocks with and without finite ones.
TEST_P(LowLatencyDispatchTest, NonFiniteChannelsUnderPowersOfTwo) {
  std::vector<LowLatencyCase> cases;
  for (const RowFormat format : {RowFormat::fp8_rounded, RowFormat::fp8_ue8m0}) {
    LowLatencyCaseShape shape = equal_shape(2, 5);
    shape.hidden = 1024;
    shape.format = format;
    LowLatencyCase& one = cases.emplace_back(make_low_latency_case(shape));
    for (std::vector<std::uint16_t>& x : one.x) {
      static constexpr std::uint16_t kKinds[] = {0x7fc0, 0xff81, 0x7f80, 0xff80};  // NaN, -NaN, infinity, -infinity
      for (std::size_t block = 0; block < x.size() / 128; ++block) {
        for (std::size_t i = 0; i < 128; i += block % 9 == 8 ? 1 : 37) x[128 * block + i] = kKinds[(block + i) % 4];
        if (block % 9 == 7) x[128 * block + 1] = 0x7f7f;  // the largest finite number
      }
    }
  }
  run_dispatches(cluster(2), cases, {0});
}

TEST_P(LowLatencyDispatchTest, EveryRouting) {
  std::vector<LowLatencyCaseShape> shapes;
  for (const Routing routing : oracle::kRoutings) {
    // Room for experts that tokens name several times.
    shapes.push_back({.tokens = {7, 0, 9}, .max_tokens = 27, .hidden = 256, .topk = 3, .routing = routing});
  }
  run_all(cluster(3), shapes);
}

TEST_P(LowLatencyDispatchTest, RandomShapes) {
  const std::uint64_t seed = test_seed();
  const std::int64_t count = environment_number("DEEP_EP_TEST_SHAPES", under_thread_sanitizer() ? 2 : 12);
  for (const int ranks : {1, 2, 3, 5, 8}) {
    if (under_thread_sanitizer() && ranks > 3) continue;  // thousands of kernel threads
    if (!missing(GetParam(), ranks).empty()) continue;
    std::vector<LowLatencyCaseShape> shapes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t of_shape = oracle::derive_seed(seed, static_cast<std::uint64_t>(i * 100 + ranks));
      shapes.push_back(random_low_latency_shape(ranks, of_shape,
                                                {.tokens = 9, .many_tokens = 40, .hidden = 8192, .local_experts = 7}));
    }
    ClusterOptions options = cluster(ranks);
    if (ranks > 3) options.host = {.multiprocessors = 2, .warps_per_block = 2};
    run_all(options, shapes, {0, 1, 2, 3});
  }
}

TEST_P(LowLatencyDispatchTest, MoreTokensThanBlocks) {
  LowLatencyCaseShape shape{.tokens = {90, 67}, .max_tokens = 120, .hidden = 512, .local_experts = 5, .topk = 6};
  LowLatencyCaseShape large = shape;
  large.hidden = 24576;  // two stages do not fit the CPU's shared memory
  large.tokens = {11, 6};
  large.max_tokens = 11;
  large.format = RowFormat::bf16;
  run_all(cluster(2), {shape, large});
}

TEST_P(LowLatencyDispatchTest, StatisticsAreAdded) {
  const LowLatencyCase one = make_low_latency_case(equal_shape(2, 6));
  run_with_buffers(cluster(2), low_latency_options(2, 6, 512), [&](Rank& rank, Buffer& buffer) {
    LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
    const std::vector<std::int32_t> before = {100, 0, 7};
    arguments.cumulative_local_expert_recv_stats = rank.upload(before, DType::int32, {3});
    std::vector<std::int64_t> costs(2, std::int64_t{1} << 60);
    arguments.wait_recv_cost_stats = rank.upload(costs, DType::int64, {2});
    for (int call = 1; call <= 3; ++call) {
      buffer.low_latency_dispatch(arguments, rank.call());
      std::vector<std::int32_t> expected = before;
      const auto& count = one.dispatched.received[static_cast<std::size_t>(rank.rank())].count;
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += call * count[i];
      require_same(expected, rank.download<std::int32_t>(*arguments.cumulative_local_expert_recv_stats), "statistics");
      const auto sums = rank.download<std::int64_t>(*arguments.wait_recv_cost_stats);
      for (std::size_t i = 0; i < costs.size(); ++i) {
        const std::int64_t cost = sums[i] - costs[i];
        require(cost >= 0 && cost < std::int64_t{1} << 50, "wait cost " + std::to_string(cost));
      }
      costs = sums;
    }
  });
}

/// The same calls under many schedules of the CPU executor.
TEST(LowLatencyScheduleTest, EverySeedGivesTheSame) {
  const std::vector<LowLatencyCaseShape> shapes = {
      {.tokens = {5, 0, 7}, .max_tokens = 7, .hidden = 256, .topk = 3, .routing = Routing::some_dropped},
      {.tokens = {2, 3, 1}, .max_tokens = 3, .hidden = 128, .topk = 2, .format = RowFormat::bf16},
      {.tokens = {4, 4, 4}, .max_tokens = 4, .hidden = 512, .topk = 4, .format = RowFormat::fp8_ue8m0},
      {.tokens = {3, 5, 0}, .max_tokens = 5, .hidden = 256, .topk = 3, .format = RowFormat::nvfp4},
      {.tokens = {2, 0, 6}, .max_tokens = 6, .hidden = 384, .topk = 2},
      // Scales on three times as many lines as a warp takes at once.
      {.tokens = {2, 1, 2}, .max_tokens = 2, .hidden = 16384, .topk = 2, .format = RowFormat::nvfp4}};
  under_schedules({.usually = 25, .sanitized = 3, .thread_sanitized = 1}, [&](std::uint64_t seed) {
    ClusterOptions options{.ranks = 3,
                           .host = {.multiprocessors = 2, .warps_per_block = seed % 3 == 0 ? 8 : 2, .seed = seed}};
    run_all(options, shapes, {0, 1});
  });
}

}  // namespace
}  // namespace deep_ep::test
