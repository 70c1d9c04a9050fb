// How ranks decide whether they end a buffer together. First three ranks that are structs look at each other, one word
// at a time, in every order in which that may happen, and each may lose its patience at any look; then real ones.
#include "csrc/buffer/low_latency/ending.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/buffer/runtime.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kMeeting = 3;
enum class MetAs : std::uint8_t { undecided, together, alone };

struct MeetingRank {
  LowLatencyEnding shows = LowLatencyEnding::no;
  std::array<LowLatencyEnding, kMeeting> saw{};
  std::uint8_t looks_at = 0;  ///< next
  MetAs met = MetAs::undecided;
  auto operator<=>(const MeetingRank&) const = default;
};
using Meeting = std::array<MeetingRank, kMeeting>;

/// One step of a rank: a look at one word, or what follows from a round of them.
void step(Meeting& meeting, int rank, bool masks, bool late) {
  MeetingRank& mine = meeting[static_cast<std::size_t>(rank)];
  if (mine.looks_at < kMeeting) {
    mine.saw[mine.looks_at] = meeting[mine.looks_at].shows;
    ++mine.looks_at;
    return;
  }
  mine.looks_at = 0;
  mine.shows = next_ending(mine.saw, masks, late, rank);
  if (mine.shows == LowLatencyEnding::goes_alone) mine.met = MetAs::alone;
  if (mine.shows == LowLatencyEnding::meets && all_meet(mine.saw, rank)) mine.met = MetAs::together;
  mine.saw = {};
}

/// All that ranks may come to, from when all of them begin. `masking`: has masked somebody; -1: nobody has.
std::set<Meeting> all_meetings(int masking) {
  std::set<Meeting> seen{Meeting{}};
  std::vector<Meeting> open{Meeting{}};
  while (!open.empty()) {
    const Meeting from = open.back();
    open.pop_back();
    for (int rank = 0; rank < kMeeting; ++rank) {
      const MeetingRank& mine = from[static_cast<std::size_t>(rank)];
      if (mine.met != MetAs::undecided) continue;
      for (const bool late : {false, true}) {
        if (late && mine.looks_at < kMeeting) continue;
        Meeting to = from;
        step(to, rank, rank == masking, late);
        if (seen.insert(to).second) open.push_back(to);
      }
    }
  }
  return seen;
}

bool has(const Meeting& meeting, MetAs how) {
  return std::ranges::any_of(meeting, [&](const MeetingRank& rank) { return rank.met == how; });
}

TEST(LowLatencyEnd, AllEndTogetherOrNobodyDoes) {
  bool together = false, alone = false;
  for (const Meeting& meeting : all_meetings(-1)) {
    together |= has(meeting, MetAs::together);
    alone |= has(meeting, MetAs::alone);
    ASSERT_FALSE(has(meeting, MetAs::together) && has(meeting, MetAs::alone));
  }
  EXPECT_TRUE(together && alone) << "both happen";
}

TEST(LowLatencyEnd, NobodyMeetsWhereOneHasMaskedAnother) {
  for (const Meeting& meeting : all_meetings(1)) ASSERT_FALSE(has(meeting, MetAs::together));
}

/// From wherever ranks have got to, all end, though nobody loses its patience any more.
TEST(LowLatencyEnd, NobodyWaitsForEver) {
  for (Meeting meeting : all_meetings(-1)) {
    for (int round = 0; round < 5 * (kMeeting + 1); ++round) {
      for (int rank = 0; rank < kMeeting; ++rank) {
        if (meeting[static_cast<std::size_t>(rank)].met == MetAs::undecided) step(meeting, rank, false, false);
      }
    }
    ASSERT_FALSE(has(meeting, MetAs::undecided));
  }
}

class LowLatencyEndTest : public ClusterTest {
 protected:
  /// Of each rank, whether it may go to the barrier, if it comes to the end when `come` returns.
  template <class Come>
  void expect_end(double timeout_s, bool together, Come come) {
    run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
      BufferOptions options = low_latency_options(4, 2, 128);
      options.low_latency.masking = true;
      options.low_latency.allow_nvlink = GetParam().topology != Topology::only_rdma;
      options.ranks_per_node = GetParam().topology == Topology::two_nodes ? 2 : 0;
      options.timeout_s = timeout_s;
      Runtime runtime(rank.bootstrap(), rank.executor(), options);
      LowLatency low_latency(runtime);
      rank.bootstrap()->barrier();
      come(rank);
      require(low_latency.meet_at_end() == together, together ? "all meet" : "it goes alone");
      if (!together) low_latency.go_alone();
      if (rank.rank() != 3) come_after_the_others(rank);
      rank.bootstrap()->barrier();
      low_latency.drain();
      rank.bootstrap()->barrier();
      low_latency.disconnect();
      runtime.unmap_peers_together();
    });
  }
  /// For expect_end: the last rank comes when all others have ended.
  bool last_comes_after_the_others_ = false;
  void come_after_the_others(Rank& rank) const {
    if (last_comes_after_the_others_) rank.bootstrap()->barrier();
  }
};
DEEP_EP_LOW_LATENCY_EVERYWHERE(LowLatencyEndTest);

TEST_P(LowLatencyEndTest, AllWaitForARankThatComesLater) {
  DEEP_EP_NEEDS_RANKS(4);
  expect_end(patience(), true, [](Rank& rank) {
    if (rank.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(200));  // makes it likely that they do
  });
}

/// No call is under way, so nobody finds that rank lost. They go alone after a while; so does that rank, when it comes.
TEST_P(LowLatencyEndTest, NobodyWaitsForEverForARankThatDoesNotCome) {
  DEEP_EP_NEEDS_RANKS(4);
  last_comes_after_the_others_ = true;
  expect_end(scaled(1), false, [&](Rank& rank) {
    if (rank.rank() == 3) come_after_the_others(rank);
  });
}

}  // namespace
}  // namespace deep_ep::test
