// Who is lost: what a long wait finds, and whom ranks accuse. The ranks here are structs; time is given in seconds ago.
#include <gtest/gtest.h>

#include <array>

#include "kernels/common/wait.hpp"
#include "kernels/low_latency/transport/masks.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 4;
constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kDeadline = 1000 * kSecond;

std::uint64_t ago(std::uint64_t seconds) { return device::now_ns() - seconds * kSecond; }

struct Member {
  WaitWatch watch{};
  std::array<FaultRecord, 2> faults{};
  std::uint64_t abort = 0;
  LowLatencyState state{};
  std::array<std::int32_t, kRanks> mask{};
  std::array<FaultRecord, kRanks> masked{};

  WaitContext wait() { return {.fault = faults.data(), .abort = &abort, .timeout_ns = kDeadline, .watch = &watch}; }
  LowLatencyParams params() {
    LowLatencyParams params;
    params.rank = watch.rank;
    params.num_ranks = kRanks;
    params.state = &state;
    params.wait = wait();
    params.mask = watch.masks ? mask.data() : nullptr;
    params.masked = masked.data();
    return params;
  }
  bool is_late(int peer, std::uint64_t seconds) {
    // Another wait of this rank looked just now.
    watch.looked = device::now_ns();
    const LowLatencyParams mine = params();
    return device::low_latency::MaskOrEnd{mine}.is_late({peer, Wanted::counts, 1}, ago(seconds));
  }
  void blame(int peer) {
    const LowLatencyParams mine = params();
    device::low_latency::MaskOrEnd{mine}.blame({peer, Wanted::counts, 1}, 0);
  }
};

/// Ranks of one node.
struct Node {
  std::array<WaitBoard, kRanks> boards{};
  std::array<Member, kRanks> ranks{};

  explicit Node(bool masks) {
    for (int r = 0; r < kRanks; ++r) {
      WaitWatch& watch = ranks[static_cast<std::size_t>(r)].watch;
      watch.rank = r;
      watch.masks = masks;
      watch.beat = &boards[static_cast<std::size_t>(r)].beat;
      watch.entries = boards[0].entries;
      for (int p = 0; p < kRanks; ++p) watch.peers[p].beat = &boards[static_cast<std::size_t>(p)].beat;
    }
  }
  Member& operator[](int rank) { return ranks[static_cast<std::size_t>(rank)]; }
  std::uint64_t& beat(int rank) { return boards[static_cast<std::size_t>(rank)].beat; }
};

TEST(Watch, AShortWaitTouchesNothing) {
  Node node(true);
  node.boards[0].entries[0] = Accusation{2, 3, Wanted::counts}.packed();
  EXPECT_FALSE(node[1].is_late(3, 100));
  EXPECT_EQ(node.beat(1), 0u);
  EXPECT_EQ(node[1].mask[3], 0);
  EXPECT_FALSE(node[1].is_late(3, 200));
  EXPECT_NE(node.beat(1), 0u) << "a long wait says that it waits";
  EXPECT_EQ(node[1].mask[3], 1) << "and looks at the board";
}

TEST(Watch, OnlyWhoDoesNotWaitItselfIsLate) {
  Node node(true);
  EXPECT_FALSE(node[1].is_late(2, 900));
  EXPECT_TRUE(node[1].is_late(2, 1100));
  node.beat(2) = 17;
  EXPECT_FALSE(node[1].is_late(2, 1100)) << "it has just said that it waits";
  node[1].watch.peers[2].moved = ago(900);
  EXPECT_FALSE(node[1].is_late(2, 2000));
  node[1].watch.peers[2].moved = ago(1100);
  EXPECT_TRUE(node[1].is_late(2, 2000)) << "it has said so long ago";
  node.beat(2) = 18;
  EXPECT_FALSE(node[1].is_late(2, 3900));
  EXPECT_TRUE(node[1].is_late(2, 4100)) << "ranks that wait in a circle";
}

TEST(Watch, RanksOfOtherNodesHaveHalfADeadlineMore) {
  Node node(true);
  node[1].watch.peers[2].beat = nullptr;
  EXPECT_FALSE(node[1].is_late(2, 1400));
  EXPECT_TRUE(node[1].is_late(2, 1600));
}

TEST(Watch, WhoHasStoodStillBeginsAnew) {
  Node node(true);
  const LowLatencyParams params = node[1].params();
  const device::low_latency::MaskOrEnd policy{params};
  node[1].watch.looked = ago(600);
  EXPECT_FALSE(policy.is_late({2, Wanted::counts, 1}, ago(1100)));
  EXPECT_FALSE(policy.is_late({2, Wanted::counts, 1}, ago(1100))) << "at the next look, too";
  node[1].watch.woke = ago(1050);
  EXPECT_TRUE(policy.is_late({2, Wanted::counts, 1}, ago(1100)));
}

TEST(Watch, TheAccusedAccusesNobody) {
  Node node(true);
  node[1].blame(2);
  EXPECT_EQ(node[1].mask, (std::array<std::int32_t, kRanks>{0, 0, 1, 0}));
  node[2].blame(1);  // it comes back, and has not seen rank 1 for long
  EXPECT_EQ(node[2].mask, (std::array<std::int32_t, kRanks>{})) << "it masks nobody";
  EXPECT_EQ(node[2].faults[0].kind, FaultKind::given_up);
  EXPECT_EQ(node[2].faults[0].peer, 1);
  EXPECT_EQ(node[2].abort, 1u);
  EXPECT_EQ(node.boards[0].entries[1], 0u);
}

TEST(Watch, AllMaskTheSameRanksInWhateverOrderTheyFindOut) {
  Node node(true);
  node[0].blame(3);
  node[1].blame(2);  // reads the first entry on its way
  node[0].blame(2);  // is on the board
  for (const int rank : {0, 1}) {
    EXPECT_EQ(node[rank].mask, (std::array<std::int32_t, kRanks>{0, 0, 1, 1})) << "rank " << rank;
    EXPECT_EQ(node[rank].watch.read, 2u);
    EXPECT_EQ(node[rank].abort, 0u);
  }
  EXPECT_EQ(node.boards[0].entries[2], 0u);
  EXPECT_EQ(node[1].masked[3].field, 1 + 0) << "who found it";
  EXPECT_EQ(node[1].masked[2].field, 0) << "itself";
}

TEST(Watch, WhomTheProgramUnmasksIsNotMaskedAgainByOldNews) {
  Node node(true);
  node[0].blame(3);
  EXPECT_FALSE(node[1].is_late(2, 200));
  EXPECT_EQ(node[1].mask[3], 1);
  node[1].mask[3] = 0;
  EXPECT_FALSE(node[1].is_late(2, 200));
  EXPECT_EQ(node[1].mask[3], 0);
}

TEST(Watch, WithoutMasksAllNameTheFirst) {
  Node node(false);
  node[0].blame(3);
  EXPECT_EQ(node[0].faults[0].kind, FaultKind::timeout);
  EXPECT_EQ(node[0].faults[0].field, 0);
  node[1].blame(0);  // which has ended its call meanwhile
  EXPECT_FALSE(node[2].is_late(1, 200));
  for (const int rank : {1, 2}) {
    EXPECT_EQ(node[rank].faults[0].kind, FaultKind::timeout);
    EXPECT_EQ(node[rank].faults[0].peer, 3) << "rank " << rank;
    EXPECT_EQ(node[rank].faults[0].field, 1 + 0) << "who waited for it";
    EXPECT_EQ(node[rank].abort, 1u);
  }
  EXPECT_FALSE(node[3].is_late(1, 200));
  EXPECT_EQ(node[3].faults[0].kind, FaultKind::given_up);
  EXPECT_EQ(node[3].faults[0].field, 0) << "it cannot come back";
}

}  // namespace
}  // namespace deep_ep::test
