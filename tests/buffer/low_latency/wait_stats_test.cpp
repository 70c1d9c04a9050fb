// Statistics of waits over low-latency calls, and what they say about who is late.
#include <chrono>
#include <thread>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

namespace deep_ep::test {
namespace {

/// Statistics of rank `rank`, that has waited so long for each source in ten dispatches, and a tenth of that in as many
/// combines.
LowLatencyStats waited(int rank, const std::vector<double>& mean_us) {
  LowLatencyStats stats{.rank = rank, .dispatch = {}, .combine = {}};
  for (const double us : mean_us) {
    stats.dispatch.calls.push_back(10);
    stats.dispatch.total_us.push_back(us * 10);
    stats.dispatch.longest_us.push_back(us * 2);
    stats.combine.calls.push_back(10);
    stats.combine.total_us.push_back(us);
    stats.combine.longest_us.push_back(us);
  }
  return stats;
}

TEST(LateRanksTest, OneIsLate) {
  const std::vector<LowLatencyStats> all = {waited(0, {0, 12, 812, 10}), waited(1, {10, 0, 790, 14}),
                                            waited(2, {1, 1, 0, 1}), waited(3, {30, 20, 900, 0})};
  const LowLatencyVerdict verdict = find_late_ranks(all);
  EXPECT_EQ(verdict.late, std::vector<int>({2}));
  EXPECT_EQ(verdict.text.find("rank 2 is late: the others wait 893.2 us for it"), 0u) << verdict.text;
  EXPECT_DOUBLE_EQ(verdict.waited_us[2], 893.2);
  EXPECT_EQ(find_late_ranks({&all[1], 1}).late, std::vector<int>({2})) << "one rank alone knows it";
  EXPECT_TRUE(find_late_ranks({&all[2], 1}).late.empty()) << "it waits for nobody itself";
}

/// Those that are held up by a late rank are a little late themselves, and are not named; equally late ones all are.
TEST(LateRanksTest, SeveralAreLate) {
  const std::vector<LowLatencyStats> all = {waited(0, {0, 900, 1000, 200, 5}), waited(1, {5, 0, 1000, 200, 5}),
                                            waited(2, {5, 900, 0, 200, 5}), waited(3, {5, 900, 1000, 0, 5}),
                                            waited(4, {5, 900, 1000, 200, 0})};
  EXPECT_EQ(find_late_ranks(all).late, std::vector<int>({2, 1})) << "the slowest first";
}

class LowLatencyWaitStatsTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyWaitStatsTest);

/// Rank 1 begins when the others wait for it, which they say, and they have waited for a while. A busy machine may take
/// longer than that while to get to its waits, so the while grows until it is seen.
TEST_P(LowLatencyWaitStatsTest, ALateRankIsNamed) {
  constexpr int kRanks = 3;
  constexpr int kLate = 1;
  DEEP_EP_NEEDS_RANKS(kRanks);
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {6, 6, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 1, .topk = 3});
  run_with_buffers(cluster(kRanks), low_latency_options(kRanks, 6, 256), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    const LowLatencyDispatchArguments dispatch = upload_arguments(rank, one.before);
    const LowLatencyCombineArguments combine = upload_combine(rank, one, handle);
    const auto be_late = [&](const std::function<void()>& call, double wait_s) {
      if (rank.rank() != kLate) call();
      rank.bootstrap()->barrier();
      if (rank.rank() == kLate) {
        std::this_thread::sleep_for(std::chrono::duration<double>(wait_s));
        call();
      }
      rank.executor()->synchronize(rank.stream());
      rank.bootstrap()->barrier();
    };
    LowLatencyVerdict verdict;
    buffer.low_latency_stats(LowLatencyStatsThen::go_on, rank.stream());
    for (double wait_s = 0.01; wait_s < 6; wait_s *= 2) {
      be_late([&] { buffer.low_latency_dispatch(dispatch, rank.call()); }, wait_s);
      be_late([&] { buffer.low_latency_combine(combine, rank.call()); }, wait_s);
      const LowLatencyStats own = buffer.low_latency_stats(LowLatencyStatsThen::reset, rank.stream());
      const std::vector<LowLatencyStats> all = gather_low_latency_stats(*rank.bootstrap(), own);
      verdict = find_late_ranks(all, 2000);
      bool seen = verdict.late == std::vector<int>{kLate};
      for (const LowLatencyStats& stats : all) {  // in both calls
        if (stats.rank == kLate) continue;
        const int other = kRanks - kLate - stats.rank;
        seen = seen && stats.dispatch.mean_us(kLate) > stats.dispatch.mean_us(other) + 1000 &&
               stats.combine.mean_us(kLate) > stats.combine.mean_us(other) + 1000;
      }
      if (seen) break;
      verdict.late.clear();
    }
    require(verdict.late == std::vector<int>{kLate}, "rank 1 is late: " + verdict.text);
    buffer.check();
  });
}

}  // namespace
}  // namespace deep_ep::test
