// A first thousand runs, in parts. scripts/faults makes any number of others.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "tests/cluster/fixture.hpp"
#include "tests/faults/campaign.hpp"
#include "tests/faults/runs.hpp"

namespace deep_ep::faults {
namespace {

constexpr int kParts = 10;

class FaultsTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Part, FaultsTest, testing::Range(0, kParts));

TEST_P(FaultsTest, EveryRunEndsAsSpecified) {
  // Sanitizers see in few runs what they can see, and ThreadSanitizer has no fibers for many at once.
  const int all = static_cast<int>(test::environment_number("DEEP_EP_TEST_FAULTS", test::under_thread_sanitizer() ? 40
                                                                                   : test::under_sanitizer()      ? 150
                                                                                                             : 1000));
  const Campaign campaign = run_campaign(
      {.first_seed = 1 + static_cast<std::uint64_t>(GetParam()) * 1000000, .runs = std::max(1, all / kParts)});
  EXPECT_EQ(campaign.verdict(), "") << campaign.report();
}

/// Each allocation that a rank makes while it makes its buffer fails in turn: everybody learns of it, nothing leaks,
/// and the next buffer works.
TEST(FaultsInSetUpTest, EveryAllocation) {
  for (const test::Topology topology : {test::Topology::one_node, test::Topology::only_rdma}) {
    bool reached = true;
    // ThreadSanitizer looks for threads, of which one failure shows as many as the next.
    for (int event = 1; reached; event += test::under_thread_sanitizer() ? 4 : 1) {
      const Plan plan{.ranks = 2,
                      .topology = topology,
                      .masking = true,
                      .steps = {{.kind = Step::Kind::low_latency_dispatch}},
                      .fault = Fault::set_up,
                      .rank = 1,
                      .event = event};
      const Verdict verdict = run(plan, test::scaled(1));
      for (const Violation& one : verdict.violations) ADD_FAILURE() << plan.describe() << ": " << one.text;
      reached = verdict.summary != "completed";
      EXPECT_TRUE(reached || event > 8) << "a buffer allocates more often than " << event << " times";
    }
  }
}

/// A process is killed early in each kind of call of each topology: the others name it, or mask it, long before the
/// deadline.
TEST(FaultsKilledTest, InEveryKindOfCall) {
  std::set<std::tuple<test::Topology, bool, Step::Kind>> seen;
  constexpr std::size_t kAll = 3 * 5 + 2 + 3 * 2;  // three topologies with all calls; only_rdma; three with masks
  for (std::uint64_t seed = 1; seen.size() < kAll && seed < 10000; ++seed) {
    const Plan plan = make_plan(seed, Fault::kill);
    const Step::Kind kind = plan.steps[static_cast<std::size_t>(plan.step)].kind;
    if (plan.event > 20 || !seen.insert({plan.topology, plan.masking, kind}).second) continue;
    const Verdict verdict = run(plan, std::min(test::scaled(60), test::cluster_patience() / 2));
    for (const Violation& one : verdict.violations) ADD_FAILURE() << plan.describe() << ": " << one.text;
    EXPECT_EQ(verdict.summary, plan.masking ? "masked" : "TimeoutError") << plan.describe();
    EXPECT_LT(verdict.slowest, 0.25) << plan.describe();
    const std::string ended = "the process of rank " + std::to_string(plan.rank) + " has ended (process ";
    for (int rank = 0; rank < plan.ranks && !plan.masking; ++rank) {
      const std::string& how = verdict.ranks[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(rank == plan.rank || how.find(ended) != std::string::npos) << plan.describe() << ": " << how;
    }
  }
  EXPECT_EQ(seen.size(), kAll);
}

/// By rails. The counts of rank 3 do not reach rank 0, which therefore does not hand on what rank 2 has sent to its
/// node: rank 1 must not name rank 2, which has sent everything.
TEST(FaultsByRailsTest, WhoHandsOnTellsForWhomItWaits) {
  if (test::under_sanitizer()) GTEST_SKIP() << "ranks are too slow to be told from those that are lost";
  const Plan plan{.ranks = 4,
                  .topology = test::Topology::rails,
                  .steps = {{.kind = Step::Kind::low_latency_dispatch}},
                  .fault = Fault::nic,
                  .rank = 3,
                  .event = 1,
                  .peer = 0};
  const Verdict verdict = run(plan, test::scaled(1));
  for (const Violation& one : verdict.violations) ADD_FAILURE() << plan.describe() << ": " << one.text;
  // Rank 3 may end its call before it has sent rank 1 its counts, too, which then waits for it directly.
  EXPECT_NE(verdict.ranks[1].find(" s for rank 3"), std::string::npos) << verdict.ranks[1];
}

}  // namespace
}  // namespace deep_ep::faults
