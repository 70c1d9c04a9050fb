// Numbers of ranks, from one to the largest NVLink domain.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class RanksTest : public testing::TestWithParam<std::tuple<Where, int>> {};

TEST_P(RanksTest, RunsRounds) {
  const auto [where, ranks] = GetParam();
  if (const std::string reason = missing(where, ranks); !reason.empty()) GTEST_SKIP() << reason;
  if (ranks > 5 && under_thread_sanitizer())
    GTEST_SKIP() << "has no threads that 5 ranks have not, and 8 take twice as long as all below";
  ClusterOptions options{.ranks = ranks, .where = where, .host = {}};
  // Every thread of every rank is a fiber: many ranks get few of them.
  if (ranks >= 8) options.host = {.multiprocessors = 2, .warps_per_block = 2};
  if (ranks > 12) options.host.multiprocessors = 1;
  const auto count = static_cast<std::uint64_t>(ranks);
  std::vector<Shape> shapes;
  shapes.push_back({.tokens = equal_tokens(ranks, 8), .local_experts = 2, .topk = 4, .seed = count});
  shapes.push_back({.tokens = oracle::make_token_counts(oracle::TokenCounts::different, ranks, 20, count),
                    .local_experts = 3,
                    .topk = 8,
                    .routing = oracle::Routing::skewed,
                    .dtype = DType::float8_e4m3,
                    .hidden = 256,
                    .scales = 2,
                    .combine_hidden = 128,
                    .bias_0 = true,
                    .seed = count + 1});
  if (ranks <= 12) {
    shapes.push_back({.tokens = oracle::make_token_counts(oracle::TokenCounts::some_empty, ranks, 9, count),
                      .routing = oracle::Routing::one_hot_expert,
                      .seed = count + 2});
  }
  for (const bool heap : {true, false}) {
    run_rounds(options, shapes, {.num_sms = 0, .returned_in_heap = heap}, {.heap_bytes = std::size_t{16} << 20});
  }
}

std::string name_of_ranks(const testing::TestParamInfo<std::tuple<Where, int>>& info) {
  return to_string(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(On, RanksTest,
                         testing::Combine(testing::ValuesIn(kThreads), testing::Values(1, 2, 3, 5, 8, 12, 72)),
                         name_of_ranks);
/// Heaps of other processes, and other addresses for the same memory.
INSTANTIATE_TEST_SUITE_P(OnProcesses, RanksTest, testing::Combine(testing::ValuesIn(kProcesses), testing::Values(4)),
                         name_of_ranks);

}  // namespace
}  // namespace deep_ep::test
