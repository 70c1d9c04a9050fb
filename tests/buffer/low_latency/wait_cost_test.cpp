// wait_recv_cost_stats: low-latency calls add the time for which they waited for each rank.
#include <algorithm>
#include <chrono>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyWaitCostTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyWaitCostTest);

/// Rank 1 begins when the others wait for it, which they say, and they have waited for a while. A busy machine may take
/// longer than that while to get to its waits, so the while grows until it is seen.
TEST_P(LowLatencyWaitCostTest, TheOthersWaitForALateRank) {
  constexpr int kRanks = 3;
  constexpr int kLate = 1;
  DEEP_EP_NEEDS_RANKS(kRanks);
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {6, 6, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 1, .topk = 3});
  run_with_buffers(cluster(kRanks), low_latency_options(kRanks, 6, 256), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    LowLatencyDispatchArguments dispatch = upload_arguments(rank, one.before);
    LowLatencyCombineArguments combine = upload_combine(rank, one, handle);
    const auto zeros = [&] { return rank.upload(std::vector<std::int64_t>(kRanks), DType::int64, {kRanks}); };
    dispatch.wait_recv_cost_stats = zeros();
    combine.wait_recv_cost_stats = zeros();
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
    const auto waited_for_late = [&](const TensorView& stats) {
      const auto cost = rank.download<std::int64_t>(stats);
      return rank.rank() == kLate || cost[kLate] > 2 * cost[static_cast<std::size_t>(kRanks - kLate - rank.rank())];
    };
    bool seen = false;
    for (double wait_s = 0.01; wait_s < 6 && !seen; wait_s *= 2) {
      be_late([&] { buffer.low_latency_dispatch(dispatch, rank.call()); }, wait_s);
      be_late([&] { buffer.low_latency_combine(combine, rank.call()); }, wait_s);
      const bool mine =
          waited_for_late(*dispatch.wait_recv_cost_stats) && waited_for_late(*combine.wait_recv_cost_stats);
      const std::vector<char> all = all_gather_values(*rank.bootstrap(), static_cast<char>(mine));
      seen = std::ranges::all_of(all, [](char each) { return each != 0; });
    }
    require(seen, "the others wait for rank 1, in both calls");
    buffer.check();
  });
}

}  // namespace
}  // namespace deep_ep::test
