// Statistics of waits over low-latency calls.
#include <algorithm>
#include <chrono>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyWaitStatsTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyWaitStatsTest);

/// Rank 1 begins when the others wait for it, which they say, and they have waited for a while. A busy machine may take
/// longer than that while to get to its waits, so the while grows until it is seen.
TEST_P(LowLatencyWaitStatsTest, TheOthersWaitForALateRank) {
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
    const auto seen_since = [&](const LowLatencyWaitTimes& before, const LowLatencyWaitTimes& now) {
      if (rank.rank() == kLate) return true;
      const auto waited = [&](int source) {
        return now.total_us.at(static_cast<std::size_t>(source)) - before.total_us.at(static_cast<std::size_t>(source));
      };
      return now.calls == std::vector<std::uint64_t>(kRanks, before.calls[0] + 1) &&
             waited(kLate) > waited(kRanks - kLate - rank.rank()) + 1000;
    };
    LowLatencyStats before = buffer.low_latency_stats(rank.stream());
    require(before.dispatch.total_us == std::vector<double>(kRanks, 0), "nothing is measured before the first call");
    bool seen = false;
    for (double wait_s = 0.01; wait_s < 6 && !seen; wait_s *= 2) {
      be_late([&] { buffer.low_latency_dispatch(dispatch, rank.call()); }, wait_s);
      be_late([&] { buffer.low_latency_combine(combine, rank.call()); }, wait_s);
      const LowLatencyStats now = buffer.low_latency_stats(rank.stream());
      const bool mine = seen_since(before.dispatch, now.dispatch) && seen_since(before.combine, now.combine);
      const std::vector<char> all = all_gather_values(*rank.bootstrap(), static_cast<char>(mine));
      seen = std::ranges::all_of(all, [](char one) { return one != 0; });
      before = now;
    }
    require(seen, "the others wait for rank 1, in both calls");
    buffer.check();
  });
}

}  // namespace
}  // namespace deep_ep::test
