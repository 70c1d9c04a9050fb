// Who is lost: what the watchers of ranks make of what others show (kernels/low_latency/transport/watch.hpp). The ranks
// here are structs, and time is what a test says.
#include "kernels/low_latency/transport/watch.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/low_latency/params.hpp"

namespace deep_ep::test {
namespace {

constexpr int kWatched = 4;
constexpr std::uint64_t kDeadline = 16'000;
constexpr std::uint64_t kLook = kDeadline / 16;
using WatchedMasks = std::array<std::int32_t, kWatched>;
using device::low_latency::Accusation;
using device::low_latency::MaskOrEnd;
using device::low_latency::WatchedCall;
using device::low_latency::Watcher;

WatchedCall dispatch_call(std::uint64_t epoch) { return {LowLatencyKind::dispatch, 0, epoch, 0}; }
WatchedCall combine_call(std::uint64_t epoch) { return {LowLatencyKind::combine, 0, epoch, 0}; }

struct WatchedNode;

struct WatchedRank {
  int rank = 0;
  std::vector<std::uint64_t> heap;
  std::array<FaultRecord, 2> faults{};
  LowLatencyState state{};
  WatchedMasks mask{};
  std::array<FaultRecord, kWatched> masked{};
  std::array<std::byte*, kWatched> heaps{};
  LowLatencyParams params;
  std::array<Watcher::Peer, kWatched> peers{};
  std::vector<Watcher> watcher;  ///< of the call that runs, if one does

  LowLatencySigns& signs() { return *params.window.signs().in(params.local); }
  std::uint64_t& entry(std::uint32_t index) { return *params.window.accusation(index).in(params.local); }
  void begin(const WatchedCall& call, std::uint64_t now) {
    watcher.clear();
    Watcher::show_beat(params);  // by the first of the other blocks
    watcher.emplace_back(params, call, peers.data(), now);
  }
  void end() { watcher.clear(); }
  bool given_up() const { return faults[0].kind == FaultKind::given_up; }
};

struct WatchedNode {
  std::array<WatchedRank, kWatched> ranks{};
  std::uint64_t now = 1'000'000;

  WatchedNode() {
    for (int r = 0; r < kWatched; ++r) {
      WatchedRank& one = (*this)[r];
      one.rank = r;
      one.params.window = LowLatencyWindow::make(0, std::size_t{1} << 20, kWatched, 4);
      one.heap.resize(one.params.window.bytes / sizeof(std::uint64_t));
      one.params.rank = r;
      one.params.num_ranks = kWatched;
      one.params.local = reinterpret_cast<std::byte*>(one.heap.data());
      one.params.state = &one.state;
      one.params.wait = {.fault = one.faults.data(), .abort = &one.state.abort, .timeout_ns = 0};
      one.params.mask = one.mask.data();
      one.params.masked = one.masked.data();
      one.state.watch.timeout_ns = kDeadline;
    }
    for (WatchedRank& one : ranks) {
      for (int r = 0; r < kWatched; ++r) one.heaps[static_cast<std::size_t>(r)] = (*this)[r].params.local;
      one.params.heaps = one.heaps.data();
    }
  }
  WatchedRank& operator[](int rank) { return ranks[static_cast<std::size_t>(rank)]; }

  /// Time passes, and every rank with a call looks as often as it should.
  void pass(std::uint64_t time) {
    for (const std::uint64_t end = now + time; now < end;) {
      now += kLook;
      for (WatchedRank& one : ranks) {
        for (Watcher& watcher : one.watcher) watcher.look(now);
      }
    }
  }
};

TEST(LowLatencyWatch, AShortCallLooksAtNobody) {
  WatchedNode node;
  node[0].entry(0) = Accusation{2, 3, Wanted::low_latency_dispatch_rows}.packed();
  node[1].begin(dispatch_call(1), node.now);
  EXPECT_EQ(node[1].signs().beat, 1u) << "it says at once that it has come";
  node.pass(kDeadline / 8 - kLook);
  EXPECT_EQ(node[1].mask, WatchedMasks{});
  EXPECT_EQ(node[1].signs().beat, 2u);
  node.pass(kLook);
  EXPECT_EQ(node[1].mask, (WatchedMasks{0, 0, 0, 1})) << "a longer one reads the board";
}

TEST(LowLatencyWatch, OnlyWhoShowsNothingAndOwesSomethingIsLost) {
  WatchedNode node;
  node[0].begin(dispatch_call(1), node.now);
  node[1].begin(combine_call(1), node.now);  // in another call, alive
  for (const int quiet : {0, 2, 3}) node[quiet].signs().sent[static_cast<int>(LowLatencyKind::combine)] = 1;
  node[2].signs().sent[static_cast<int>(LowLatencyKind::dispatch)] = 1;
  node.pass(kDeadline);
  EXPECT_EQ(node[0].mask, WatchedMasks{}) << "not before a whole deadline in which it has looked";
  node.pass(kDeadline / 4);
  EXPECT_EQ(node[0].mask, (WatchedMasks{0, 0, 0, 1}));
  EXPECT_EQ(node[0].state.mask_version, 2u);
  EXPECT_EQ(node[0].masked[3].wanted, Wanted::low_latency_dispatch_rows);
  EXPECT_EQ(node[0].masked[3].field, 1 + 0) << "who has found it";
  EXPECT_EQ(Accusation::unpack(node[0].entry(0)).accused, 3);
  EXPECT_EQ(node[0].entry(1), 0u);
  EXPECT_EQ(node[0].faults[0].kind, FaultKind::none);
}

TEST(LowLatencyWatch, EachDebtCounts) {
  for (const WatchedCall& call :
       {WatchedCall{LowLatencyKind::dispatch, 5, 0, 0}, WatchedCall{LowLatencyKind::combine, 0, 5, 0},
        WatchedCall{LowLatencyKind::dispatch, 0, 0, 5}}) {
    for (const std::uint64_t shown : {4u, 5u}) {
      WatchedNode node;
      for (int peer = 1; peer < kWatched; ++peer) {
        const LowLatencyWindow& window = node[0].params.window;
        *window.acknowledged(LowLatencyKind::dispatch, peer).in(node[0].params.local) = shown;
        *window.barrier(peer).in(node[0].params.local) = shown;
        node[peer].signs().sent[static_cast<int>(LowLatencyKind::combine)] = shown;
      }
      node[0].begin(call, node.now);
      node.pass(2 * kDeadline);
      EXPECT_EQ(node[0].mask, shown == 5 ? WatchedMasks{} : (WatchedMasks{0, 1, 1, 1})) << call.received << call.sent;
    }
  }
}

TEST(LowLatencyWatch, WhatACallWaitsFor) {
  constexpr LowLatencyEpochs kEpochs{.send = 7, .receive = 6};
  const auto of = [&](LowLatencyKind kind, LowLatencyPhase phase) {
    const WatchedCall call = WatchedCall::of(kind, kEpochs, phase);
    EXPECT_EQ(call.barrier, 0u);
    return std::array<std::uint64_t, 2>{call.received, call.sent};
  };
  using Words = std::array<std::uint64_t, 2>;
  EXPECT_EQ(of(LowLatencyKind::dispatch, LowLatencyPhase::send), (Words{5, 0}));
  EXPECT_EQ(of(LowLatencyKind::dispatch, LowLatencyPhase::receive), (Words{0, 6}));
  EXPECT_EQ(of(LowLatencyKind::combine, LowLatencyPhase::send), (Words{5, 7})) << "it needs the selections";
  EXPECT_EQ(of(LowLatencyKind::combine, LowLatencyPhase::receive), (Words{0, 6}));
  EXPECT_EQ(of(LowLatencyKind::combine, LowLatencyPhase::both), (Words{5, 7}));
  EXPECT_EQ(WatchedCall::of(LowLatencyKind::dispatch, {2, 2}, LowLatencyPhase::both).received, 0u);
}

/// The case that split groups: two ranks wait for the dead one in combine, a third, which has nothing to do with it
/// there, in the next dispatch; and each comes to its call at another moment.
TEST(LowLatencyWatch, SomeWaitInCombineAndSomeInTheNextDispatch) {
  WatchedNode node;
  node[3].signs().beat = 17;  // it has begun, and died
  node[0].begin(combine_call(1), node.now);
  node.pass(kDeadline / 2);
  node[1].begin(combine_call(1), node.now);
  node[2].signs().sent[static_cast<int>(LowLatencyKind::combine)] = 1;
  node[2].begin(dispatch_call(2), node.now);
  node.pass(kDeadline * 3 / 4);
  for (const int living : {0, 1, 2}) {
    EXPECT_EQ(node[living].mask, (WatchedMasks{0, 0, 0, 1})) << "rank " << living;
    EXPECT_EQ(node[living].state.watch.read, 1u);
  }
  // Those in combine go on, at last to the dispatch in which rank 2 has waited for longer than a deadline.
  for (const int living : {0, 1}) node[living].signs().sent[static_cast<int>(LowLatencyKind::combine)] = 1;
  node[0].begin(dispatch_call(2), node.now);
  node[1].end();
  node.pass(kDeadline * 7 / 8);  // rank 1 comes late, by less than a deadline
  node[1].begin(dispatch_call(2), node.now);
  node.pass(kDeadline);
  for (const int living : {0, 1, 2}) {
    EXPECT_EQ(node[living].mask, (WatchedMasks{0, 0, 0, 1})) << "rank " << living;
    EXPECT_EQ(node[living].faults[0].kind, FaultKind::none);
  }
}

TEST(LowLatencyWatch, WhoHasStoodStillAccusesNobodyAndIsTold) {
  WatchedNode node;
  node[0].begin(dispatch_call(1), node.now);
  node[1].begin(dispatch_call(1), node.now);
  node.pass(kDeadline / 2);
  Watcher still = node[1].watcher.front();
  node[1].end();
  node[2].signs().sent[0] = node[3].signs().sent[0] = 1;
  node.pass(2 * kDeadline);
  EXPECT_EQ(node[0].mask, (WatchedMasks{0, 1, 0, 0}));
  node[0].end();
  node.now += 100 * kDeadline;
  still.look(node.now);
  EXPECT_TRUE(node[1].given_up());
  EXPECT_EQ(node[1].faults[0].peer, 0);
  EXPECT_EQ(node[1].state.abort, 1u);
  for (int look = 0; look < 20; ++look) still.look(node.now += kDeadline);
  EXPECT_EQ(node[1].mask, WatchedMasks{}) << "it masks nobody";
  EXPECT_EQ(node[0].entry(1), 0u);
}

TEST(LowLatencyWatch, AWatchThatLooksSeldomNeedsSeveralLooks) {
  WatchedNode node;
  node[0].begin(dispatch_call(1), node.now);
  node[2].signs().sent[0] = node[3].signs().sent[0] = 1;
  int looks = 0;
  while (node[0].mask[1] == 0 && looks < 100) {
    node[0].watcher.front().look(node.now += 10 * kDeadline);
    ++looks;
    node[1].signs().beat += looks < 3 ? 1 : 0;
  }
  EXPECT_EQ(looks, 3 + 4);
}

TEST(LowLatencyWatch, OfTwoThatAccuseEachOtherOneGoesOn) {
  for (const int first : {1, 2}) {
    const int second = 3 - first;
    WatchedNode node;
    node[0].signs().sent[0] = node[3].signs().sent[0] = 1;
    node[first].begin(dispatch_call(1), node.now);
    node[second].begin(dispatch_call(1), node.now);
    // Each believes that the other shows nothing.
    for (int look = 0; look < 40; ++look) {
      node.now += kLook;
      const std::uint64_t beats[] = {node[first].signs().beat, node[second].signs().beat};
      node[second].signs().beat = 1;
      if (!node[first].given_up()) node[first].watcher.front().look(node.now);
      node[second].signs().beat = beats[1];
      node[first].signs().beat = 1;
      if (!node[second].given_up()) node[second].watcher.front().look(node.now);
      node[first].signs().beat = beats[0];
    }
    EXPECT_FALSE(node[first].given_up());
    EXPECT_TRUE(node[second].given_up());
    EXPECT_EQ(node[first].mask[static_cast<std::size_t>(second)], 1);
    EXPECT_EQ(node[second].mask, WatchedMasks{});
    EXPECT_EQ(node[0].entry(1), 0u);
  }
}

TEST(LowLatencyWatch, WhomTheProgramUnmasksIsNotMaskedAgainByOldNews) {
  WatchedNode node;
  node[0].entry(0) = Accusation{2, 3, Wanted::low_latency_dispatch_rows}.packed();
  node[1].begin(dispatch_call(1), node.now);
  node[2].begin(dispatch_call(1), node.now);
  node[0].begin(dispatch_call(1), node.now);
  node.pass(kDeadline / 4);
  EXPECT_EQ(node[1].mask[3], 1);
  node[1].mask[3] = 0;
  node.pass(kDeadline / 4);
  EXPECT_EQ(node[1].mask[3], 0);
  node.pass(2 * kDeadline);
  EXPECT_EQ(node[1].mask[3], 1) << "but when it does not come again";
  EXPECT_EQ(Accusation::unpack(node[0].entry(1)).accused, 3);
}

TEST(LowLatencyWatch, WhatIsSaidBeforeTheProgramUnmasksIsNeverActedUpon) {
  for (const int unmasked : {-1, 1, 3}) {
    WatchedNode node;
    node[0].entry(0) = Accusation{0, 3, Wanted::low_latency_dispatch_rows}.packed();
    node[0].entry(1) = Accusation{0, 1, Wanted::low_latency_dispatch_rows}.packed();
    node[2].mask = {1, 1, 1, 1};
    node[2].begin(dispatch_call(1), node.now);
    node[2].watcher.front().unmask(unmasked);
    const WatchedMasks after = unmasked < 0    ? WatchedMasks{}
                               : unmasked == 1 ? WatchedMasks{1, 0, 1, 1}
                                               : WatchedMasks{1, 1, 1, 0};
    EXPECT_EQ(node[2].mask, after);
    for (const int peer : {0, 1, 3}) node[peer].signs().sent[0] = 1;
    node.pass(kDeadline);
    EXPECT_EQ(node[2].mask, after) << "it had not read that";
    EXPECT_EQ(node[2].state.watch.read, 2u);

    // The one that was accused itself: it goes on if it clears all masks, like the others.
    node[1].begin(dispatch_call(1), node.now);
    node[1].watcher.front().unmask(unmasked);
    node[2].signs().sent[0] = 1;
    node.pass(kDeadline);
    EXPECT_EQ(node[1].given_up(), unmasked == 3);
    EXPECT_EQ(node[1].mask[3], unmasked == 1 ? 1 : 0);
  }
}

TEST(LowLatencyWatch, AWaitThatNobodyWatchedEndsTheCall) {
  for (const bool accused : {false, true}) {
    WatchedNode node;
    if (accused) node[0].entry(0) = Accusation{2, 1, Wanted::low_latency_dispatch_rows}.packed();
    MaskOrEnd{node[1].params}.blame({3, Wanted::low_latency_dispatch_rows, 1}, 0);
    node[1].begin(dispatch_call(1), node.now);
    node[1].watcher.front().finish();
    EXPECT_EQ(node[1].given_up(), accused);
    EXPECT_EQ(node[0].entry(accused ? 1 : 0), 0u) << "nobody is accused";
    EXPECT_EQ(node[1].state.abort, 1u);
    if (accused) continue;
    EXPECT_EQ(node[1].faults[0].kind, FaultKind::timeout);
    EXPECT_EQ(node[1].faults[0].peer, 3);
    EXPECT_EQ(node[1].faults[0].field, 24) << "deadlines, more than a watcher allows";
  }
  WatchedNode node;
  node[0].entry(0) = Accusation{2, 3, Wanted::low_latency_dispatch_rows}.packed();
  node[1].begin(dispatch_call(1), node.now);
  node.pass(kDeadline);
  EXPECT_EQ(node[1].mask, (WatchedMasks{0, 0, 0, 1}));
  node[1].watcher.front().finish();
  EXPECT_EQ(node[1].faults[0].kind, FaultKind::none) << "what the board says is agreed";
}

TEST(LowLatencyWatch, WithoutADeadlineNobodyIsLost) {
  WatchedNode node;
  node[0].state.watch.timeout_ns = 0;
  node[0].entry(0) = Accusation{2, 3, Wanted::low_latency_dispatch_rows}.packed();
  node[0].begin(dispatch_call(1), node.now);
  node.pass(100 * kDeadline);
  EXPECT_EQ(node[0].mask, WatchedMasks{});
  EXPECT_EQ(node[0].faults[0].kind, FaultKind::none);
}

TEST(LowLatencyWatch, WhoWaitsThoughAllHaveSentIsMaskedByHand) {
  WatchedNode node;
  for (const int peer : {0, 2, 3}) node[peer].signs().sent[0] = 1;
  node[1].begin(dispatch_call(1), node.now);
  node.pass(Watcher::kMostDeadlines * kDeadline);
  EXPECT_EQ(node[1].faults[0].kind, FaultKind::none);
  node.pass(kDeadline / 8);
  EXPECT_EQ(node[1].faults[0].kind, FaultKind::timeout);
  EXPECT_EQ(node[1].faults[0].peer, 1) << "it can name nobody else";
  EXPECT_EQ(node[1].faults[0].wanted, Wanted::nothing);
  EXPECT_EQ(node[1].faults[0].field, 8) << "deadlines";
}

TEST(LowLatencyWatch, AFullBoardEndsTheCall) {
  WatchedNode node;
  node[1].state.watch.read = kMostAccusations;
  node[1].begin(dispatch_call(1), node.now);
  node.pass(2 * kDeadline);
  EXPECT_EQ(node[1].faults[0].kind, FaultKind::timeout);
  EXPECT_EQ(node[1].mask, WatchedMasks{});
}

TEST(LowLatencyWatch, RanksThatMixUpTheirCallsDoNotWaitForEver) {
  WatchedNode node;
  node[0].signs().sent[0] = node[3].signs().sent[0] = node[0].signs().sent[1] = node[3].signs().sent[1] = 1;
  node[1].begin(dispatch_call(1), node.now);
  node[2].begin(combine_call(1), node.now);
  node.pass(Watcher::kMostDeadlines * kDeadline);
  EXPECT_EQ(node[1].faults[0].kind, FaultKind::none);
  node.pass(kDeadline / 8);
  EXPECT_EQ(node[1].faults[0].kind, FaultKind::timeout);
  EXPECT_EQ(node[1].faults[0].peer, 2);
  EXPECT_EQ(node[1].faults[0].field, 8) << "deadlines";
  EXPECT_EQ(node[1].mask, WatchedMasks{});
}

}  // namespace
}  // namespace deep_ep::test
