// Who is lost where some ranks are far (kernels/low_latency/transport/news.hpp). The ranks here are structs, time is
// what a test says, and what is posted arrives when a test says so.
#include "kernels/low_latency/transport/news.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "kernels/low_latency/combine/debts.hpp"
#include "kernels/low_latency/dispatch/debts.hpp"
#include "kernels/low_latency/transport/watch.hpp"
#include "kernels/rdma/decode.hpp"
#include "tests/executor/host_kernel.hpp"

namespace deep_ep::test {
namespace {

constexpr int kTold = 4;  // ranks: 0 and 1 in one node, 2 and 3 in the other
constexpr std::uint64_t kNewsDeadline = 16'000;
constexpr std::uint64_t kNewsLook = kNewsDeadline / 16;
using ToldMasks = std::array<std::int32_t, kTold>;
using device::low_latency::Accusation;
using device::low_latency::FarWatcher;
using device::low_latency::MaskOrEnd;
using device::low_latency::WatchedCall;
using device::low_latency::WatchedPeer;

/// Which far peers owe something.
struct SaidDebts {
  const std::array<bool, kTold>* owes;
  device::Awaited rows_of(int peer) const {
    const bool any = (*owes)[static_cast<std::size_t>(peer)];
    return {peer, any ? Wanted::low_latency_dispatch_rows : Wanted::nothing, 1};
  }
};

/// What may wait runs as a kernel.
template <class Work>
void in_kernel(Work work) {
  Machine().run({1, 32, 0}, [&](std::byte*) {
    if (device::thread_index() == 0) work();
  });
}

/// A queue pair of which the test is the NIC.
struct PlayedQueue {
  std::array<device::rdma::WorkQueueEntry, 64> ring{};
  device::rdma::CompletionEntry completion{};
  std::uint64_t doorbell = 0, executed = 0;
  RdmaQueueState state{};

  PlayedQueue() { completion.tail = device::rdma::tail_word(0, device::rdma::kCompletionNotYetWritten); }
  RdmaPeerParams params(int peer) {
    RdmaPeerParams params;
    params.queue = {.ring = ring.data(),
                    .completion = &completion,
                    .doorbell = &doorbell,
                    .state = &state,
                    .kind = RdmaDoorbell::producer_index,
                    .number = 1,
                    .depth = 64,
                    .batch = 32,
                    .peer = peer};
    return params;
  }
  /// Additions, which are all that watchers post.
  void execute(std::byte* heap) {
    using device::rdma::wide;
    for (; executed < doorbell; ++executed) {
      const device::rdma::WorkQueueEntry& entry = ring[executed % ring.size()];
      const std::uint64_t address = wide(entry.segment[1].word[0], entry.segment[1].word[1]);
      *reinterpret_cast<std::uint64_t*>(heap + address) += wide(entry.segment[2].word[0], entry.segment[2].word[1]);
      completion.tail = device::rdma::tail_word(executed, device::rdma::kCompletionOk);
    }
  }
  void fail() { completion.tail = device::rdma::tail_word(doorbell - 1, device::rdma::kCompletionError); }
};

struct ToldRank {
  std::vector<std::uint64_t> heap;
  std::array<FaultRecord, 2> faults{};
  LowLatencyState state{};
  ToldMasks mask{};
  std::array<FaultRecord, kTold> masked{};
  std::array<std::byte*, kTold> heaps{};
  std::array<LowLatencyTold, kTold> told{};
  std::array<PlayedQueue, kTold> queues, queues_of_rows;
  std::vector<RdmaPeerParams> pairs;
  std::array<bool, kTold> owes{};
  std::array<WatchedPeer, kTold> peers{};
  LowLatencyParams params;
  std::vector<FarWatcher<SaidDebts>> watcher;  ///< of the call that runs, if one does
  bool dead = false;

  FarWatcher<SaidDebts> watch(const WatchedCall& call, std::uint64_t now) {
    return {params, SaidDebts{&owes}, call, peers.data(), now};
  }
  void begin(std::uint64_t now) {
    watcher.clear();
    watcher.push_back(watch({LowLatencyKind::dispatch, 0, 1, 0}, now));
  }
  bool given_up() const { return faults[0].kind == FaultKind::given_up; }
  const std::uint64_t& said(int source, std::uint32_t index) {
    return *params.window.said(source, index).in(params.local);
  }
  LowLatencySigns& signs() { return *params.window.signs().in(params.local); }
};

struct ToldGroup {
  std::array<ToldRank, kTold> ranks;
  std::uint64_t now = 1'000'000;

  ToldGroup() {
    for (int r = 0; r < kTold; ++r) {
      ToldRank& one = (*this)[r];
      LowLatencyParams& params = one.params;
      params.window = LowLatencyWindow::make(0, std::size_t{1} << 20, kTold, 4);
      one.heap.resize(params.window.bytes / sizeof(std::uint64_t));
      params.rank = r;
      params.num_ranks = kTold;
      params.local = reinterpret_cast<std::byte*>(one.heap.data());
      params.state = &one.state;
      params.wait = {.fault = one.faults.data(), .abort = &one.state.abort, .timeout_ns = 0};
      params.mask = one.mask.data();
      params.masked = one.masked.data();
      params.told = one.told.data();
      one.state.watch.timeout_ns = kNewsDeadline;
      one.pairs.resize(static_cast<std::size_t>((watch_channel(1) + 1) * kTold));
      for (int peer = 0; peer < kTold; ++peer) {
        if (peer / 2 == r / 2) continue;
        params.set_far(peer);
        for (int channel = 0; channel <= watch_channel(1); ++channel) {
          auto& queues = channel == watch_channel(1) ? one.queues : one.queues_of_rows;
          one.pairs[static_cast<std::size_t>(channel * kTold + peer)] =
              queues[static_cast<std::size_t>(peer)].params(peer);
        }
      }
      params.peers = one.pairs.data();
    }
    for (int r = 0; r < kTold; ++r) {
      const int other = r ^ 1;
      (*this)[r].heaps[static_cast<std::size_t>(r)] = (*this)[r].params.local;
      (*this)[r].heaps[static_cast<std::size_t>(other)] = (*this)[other].params.local;
      (*this)[r].params.heaps = (*this)[r].heaps.data();
    }
  }
  ToldRank& operator[](int rank) { return ranks[static_cast<std::size_t>(rank)]; }

  void deliver() {
    for (ToldRank& one : ranks) {
      for (int peer = 0; peer < kTold && !one.dead; ++peer) {
        one.queues[static_cast<std::size_t>(peer)].execute((*this)[peer].params.local);
      }
    }
  }
  /// Time passes, and every rank with a call looks as often as it should.
  void pass(std::uint64_t time) {
    for (const std::uint64_t end = now + time; now < end;) {
      now += kNewsLook;
      for (ToldRank& one : ranks) {
        if (one.dead) continue;
        for (auto& watcher : one.watcher) watcher.look(now);
      }
      deliver();
    }
  }
  /// `accuser` says so to `to` alone.
  void say(int accuser, int to, int accused) {
    ToldRank& rank = (*this)[to];
    LowLatencyTold& told = (*this)[accuser].told[static_cast<std::size_t>(to)];
    *rank.params.window.said(accuser, told.said++).in(rank.params.local) =
        Accusation{accuser, accused, Wanted::low_latency_dispatch_rows}.packed();
  }
  std::vector<int> who_masks(int lost) const {
    std::vector<int> who;
    for (int r = 0; r < kTold; ++r) {
      if (ranks[static_cast<std::size_t>(r)].mask[static_cast<std::size_t>(lost)] != 0) who.push_back(r);
    }
    return who;
  }
};

TEST(LowLatencyNews, WhoShowsNothingAndOwesSomethingIsLostToAll) {
  ToldGroup group;
  for (const int waiting : {0, 1, 2}) group[waiting].begin(group.now);
  group[0].owes = {false, false, true, true};  // rank 2 waits, too, and so owes
  group.pass(kNewsDeadline);
  EXPECT_EQ(group.who_masks(3), std::vector<int>{}) << "not before a whole deadline in which it has looked";
  group.pass(kNewsDeadline / 4);
  EXPECT_EQ(group.who_masks(3), (std::vector<int>{0, 1, 2}));
  group.pass(3 * kNewsDeadline);
  for (const int living : {0, 1, 2}) {
    EXPECT_EQ(group[living].mask, (ToldMasks{0, 0, 0, 1})) << "rank " << living << ": who waits shows its beat";
    EXPECT_EQ(group[living].faults[0].kind, FaultKind::none);
    EXPECT_EQ(group[living].state.mask_version, 2u);
    EXPECT_EQ(group[living].masked[3].wanted, Wanted::low_latency_dispatch_rows);
  }
  EXPECT_NE(group[3].said(0, 0), 0u) << "the lost rank is told, too";
  EXPECT_EQ(group[2].said(0, 1), 0u) << "and everybody once";
}

TEST(LowLatencyNews, WhoOwesNothingIsNotLostHoweverQuiet) {
  ToldGroup group;
  group[0].begin(group.now);
  for (const int near : {0, 1}) group[near].signs().sent[0] = 1;
  group.pass(3 * kNewsDeadline);
  EXPECT_EQ(group[0].mask, ToldMasks{});
}

TEST(LowLatencyNews, WhateverComesIsASign) {
  using Place = Place<std::uint64_t>;
  const LowLatencyWindow window = ToldGroup()[0].params.window;
  for (const Place& word :
       {window.far_beat(2), window.barrier(2), window.acknowledged(LowLatencyKind::combine, 2),
        window.begun(LowLatencyKind::dispatch, 2), window.progress(LowLatencyKind::combine, 1, 2, 0)}) {
    ToldGroup group;
    group[0].begin(group.now);
    group[0].owes = {false, false, true, false};
    group.pass(kNewsDeadline);
    ++*word.in(group[0].params.local);
    group.pass(kNewsDeadline - kNewsLook);
    EXPECT_EQ(group[0].mask[2], 0);
    group.pass(kNewsDeadline / 4);
    EXPECT_EQ(group[0].mask[2], 1);
  }
}

TEST(LowLatencyNews, AShortCallPostsNothing) {
  ToldGroup group;
  group[0].begin(group.now);
  group.pass(kNewsDeadline / 8 - kNewsLook);
  in_kernel([&] { group[0].watcher.front().finish(); });
  EXPECT_EQ(group[0].queues[2].doorbell, 0u);
  group.pass(kNewsLook);
  EXPECT_EQ(group[0].queues[2].doorbell, 1u);
}

TEST(LowLatencyNews, OneBeatAtATimeIsOnItsWay) {
  ToldGroup group;
  group[0].begin(group.now);
  for (const int near : {0, 1}) group[near].signs().sent[0] = 1;
  for (int look = 0; look < 40; ++look) group[0].watcher.front().look(group.now += kNewsLook);
  EXPECT_EQ(group[0].queues[2].doorbell, 1u);
  group.deliver();
  group[0].watcher.front().look(group.now += kNewsLook);
  EXPECT_EQ(group[0].queues[2].doorbell, 2u);
}

TEST(LowLatencyNews, AnAccuserThatDiesHalfWay) {
  for (const int told : {0, 1, 2}) {
    ToldGroup group;
    group.say(3, told, told == 0 ? 1 : 0);
    const int accused = told == 0 ? 1 : 0;
    group[3].dead = true;
    for (const int r : {0, 1, 2}) group[r].begin(group.now);
    group.pass(kNewsDeadline / 4);
    std::vector<int> others;
    for (const int r : {0, 1, 2}) {
      if (r != accused) others.push_back(r);
    }
    EXPECT_EQ(group.who_masks(accused), others);
    EXPECT_TRUE(group[accused].given_up());
    EXPECT_EQ(group[accused].mask, ToldMasks{}) << "it masks nobody";
    EXPECT_EQ(group[others.front()].masked[static_cast<std::size_t>(accused)].field, 1 + 3) << "who has found it";
  }
}

TEST(LowLatencyNews, TwoThatAccuseEachOtherAreLostToAll) {
  ToldGroup group;
  for (int r = 0; r < kTold; ++r) group[r].begin(group.now);
  group.say(0, 2, 2);
  group.say(2, 0, 0);
  group.say(0, 1, 2);
  group.say(2, 3, 0);
  group.pass(kNewsDeadline / 2);
  for (const int living : {1, 3}) EXPECT_EQ(group[living].mask, (ToldMasks{1, 0, 1, 0})) << "rank " << living;
  for (const int lost : {0, 2}) EXPECT_TRUE(group[lost].given_up());
}

TEST(LowLatencyNews, WhatIsSaidBeforeTheProgramUnmasksIsNeverActedUpon) {
  for (const int unmasked : {-1, 3}) {
    ToldGroup group;
    group.say(0, 2, 3);
    group.say(1, 2, 3);
    group[2].mask = {0, 0, 0, 1};
    group[2].watch({LowLatencyKind::dispatch, 0, 0, 0}, group.now).unmask(unmasked);
    EXPECT_EQ(group[2].mask, ToldMasks{});
    group[2].begin(group.now);
    for (const int near : {2, 3}) group[near].signs().sent[0] = 1;
    group.pass(kNewsDeadline);
    EXPECT_EQ(group[2].mask, ToldMasks{});
    group.say(0, 2, 3);
    group.pass(kNewsDeadline);
    EXPECT_EQ(group[2].mask, (ToldMasks{0, 0, 0, 1})) << "but what is said then";
  }
}

TEST(LowLatencyNews, UnmaskingOneRankTakesNoteOfTheOthers) {
  ToldGroup group;
  group.say(0, 2, 3);
  group.say(0, 2, 1);
  in_kernel([&] { group[2].watch({LowLatencyKind::dispatch, 0, 0, 0}, group.now).unmask(3); });
  EXPECT_EQ(group[2].mask, (ToldMasks{0, 1, 0, 0}));
  group.deliver();
  EXPECT_NE(group[0].said(2, 0), 0u) << "and passes it on";
}

TEST(LowLatencyNews, WhoWasMaskedMissesNothingThatItMustReadLater) {
  ToldGroup group;
  for (const int r : {0, 1}) group[r].begin(group.now);
  group[0].watch({LowLatencyKind::dispatch, 0, 0, 0}, group.now).mask(2);
  group.say(1, 0, 3);
  group.pass(kNewsDeadline / 4);
  EXPECT_EQ(group[0].mask, (ToldMasks{0, 0, 1, 1}));
  EXPECT_EQ(group[2].said(0, 0), 0u) << "nobody tells a masked rank anything";
  group[0].watch({LowLatencyKind::dispatch, 0, 0, 0}, group.now).unmask(-1);
  group[0].begin(group.now);
  group.say(1, 0, 3);
  group.pass(kNewsDeadline / 4);
  EXPECT_NE(group[2].said(0, 0), 0u) << "the first entry is the first that it is told";
}

TEST(LowLatencyNews, WhomTheProgramMasksIsAccusedByNobody) {
  ToldGroup group;
  group[0].begin(group.now);
  group[0].watch({LowLatencyKind::dispatch, 0, 0, 0}, group.now).mask(2);
  group.pass(kNewsDeadline / 4);
  in_kernel([&] { group[0].watcher.front().finish(); });
  EXPECT_EQ(group[0].mask, (ToldMasks{0, 0, 1, 0}));
  EXPECT_EQ(group[1].said(0, 0), 0u);
}

/// It hears of nobody, as all leave it out, and so accuses everybody.
TEST(LowLatencyNews, WhomTheProgramMasksIsNotBelieved) {
  ToldGroup group;
  const WatchedCall no_call{LowLatencyKind::dispatch, 0, 0, 0};
  for (const int r : {0, 1}) group[r].watch(no_call, group.now).mask(2);
  for (const int r : {0, 1}) {
    group.say(2, r, 1);
    group.say(2, r, 3);
    group[r].begin(group.now);
  }
  group.pass(kNewsDeadline / 4);
  for (const int r : {0, 1}) {
    EXPECT_EQ(group[r].mask, (ToldMasks{0, 0, 1, 0})) << "rank " << r;
    EXPECT_FALSE(group[r].given_up()) << "rank " << r;
  }
  group[0].watch(no_call, group.now).unmask(2);
  group.say(2, 0, 3);
  group.pass(kNewsDeadline / 4);
  EXPECT_EQ(group[0].mask, (ToldMasks{0, 0, 0, 1})) << "but when it is unmasked";
}

TEST(LowLatencyNews, AMaskThatNobodyAgreedToIsNoAccusation) {
  for (const bool looks : {false, true}) {
    ToldGroup group;
    group[0].begin(group.now);
    for (const int near : {0, 1}) group[near].signs().sent[0] = 1;
    MaskOrEnd{group[0].params}.mask_rank({2, Wanted::low_latency_dispatch_rows, 1}, 0);  // a wait's own deadline
    if (looks) group.pass(kNewsDeadline / 2);
    in_kernel([&] { group[0].watcher.front().finish(); });
    EXPECT_EQ(group[0].faults[0].kind, FaultKind::timeout);
    EXPECT_EQ(group[0].faults[0].peer, 2);
    EXPECT_EQ(group[1].said(0, 0), 0u);
  }
}

/// What has come of it may look as if it had sent all.
TEST(LowLatencyNews, WhoDisagreesWithAnotherTellsAll) {
  ToldGroup group;
  for (int r = 0; r < kTold; ++r) group[r].begin(group.now);
  device::report_fault(group[3].params.wait, FaultKind::mismatch, Wanted::low_latency_combine_selection, 0, 0, 1, 2);
  for (int kernel = 0; kernel < 2; ++kernel) {
    in_kernel([&] { group[3].watcher.front().finish(); });
  }
  group.deliver();
  group[3].watcher.clear();
  group.pass(kNewsDeadline / 4);
  for (const int r : {0, 1, 2}) {
    EXPECT_EQ(group[r].mask, (ToldMasks{0, 0, 0, 1})) << "rank " << r;
    EXPECT_EQ(group[r].masked[3].field, 1 + 3);
    EXPECT_EQ(group[r].said(3, 1), 0u) << "once";
    EXPECT_FALSE(group[r].given_up()) << "rank " << r;
  }
  EXPECT_EQ(group[3].mask, ToldMasks{});
  EXPECT_EQ(group[3].said(3, 0), 0u) << "not itself";
}

TEST(LowLatencyNews, WhoseCallEndsByATimeoutTellsNobody) {
  for (const FaultKind kind : {FaultKind::timeout, FaultKind::given_up}) {
    ToldGroup group;
    group[3].begin(group.now);
    device::report_fault(group[3].params.wait, kind, Wanted::low_latency_dispatch_rows, 0, 0, 1, 2);
    in_kernel([&] { group[3].watcher.front().finish(); });
    EXPECT_EQ(group[2].said(3, 0), 0u);
  }
}

TEST(LowLatencyNews, AFailedQueuePairIsAnAccusation) {
  enum { seen_by_a_poster, of_rows, of_watchers };
  for (const int which : {seen_by_a_poster, of_rows, of_watchers}) {
    ToldGroup group;
    group[0].begin(group.now);
    if (which != seen_by_a_poster) {
      group.pass(kNewsDeadline / 8);
      (which == of_rows ? group[0].queues_of_rows : group[0].queues)[2].fail();
      group[0].watcher.front().look(group.now += kNewsLook);
    } else {
      MaskOrEnd{group[0].params}.mask_rank({2, Wanted::rdma_completion, 0}, 0, 1 << 24);  // by a poster
      in_kernel([&] { group[0].watcher.front().finish(); });
    }
    EXPECT_EQ(group[0].mask, (ToldMasks{0, 0, 1, 0})) << which;
    EXPECT_EQ(Accusation::unpack(group[1].said(0, 0)).accused, 2);
    EXPECT_EQ(Accusation::unpack(group[1].said(0, 0)).wanted, Wanted::rdma_completion);
    EXPECT_EQ(group[1].said(0, 1), 0u) << "once";
    EXPECT_EQ(group[0].faults[0].kind, FaultKind::none);
    EXPECT_GE(group[0].state.watch.agreed, group[0].state.mask_version);
  }
}

TEST(LowLatencyNews, OneWatcherOfARankLooksAtATime) {
  ToldGroup group;
  group[0].begin(group.now);
  group[0].state.looking = 1;
  group.say(1, 0, 3);
  group.pass(kNewsDeadline / 2);
  EXPECT_EQ(group[0].mask, ToldMasks{});
  group[0].state.looking = 0;
  group.pass(kNewsLook);
  EXPECT_EQ(group[0].mask, (ToldMasks{0, 0, 0, 1}));
  EXPECT_EQ(group[0].state.looking, 0u);
}

/// Its kernel has been ended in the middle of a look: nothing waits for that longer than for anything else.
TEST(LowLatencyNews, AWatcherThatNeverEndsItsLookBreaksTheBuffer) {
  using Work = void (*)(FarWatcher<SaidDebts>&);
  const std::array<Work, 5> works = {[](auto& watcher) { watcher.hear(); }, [](auto& watcher) { watcher.mask(2); },
                                     [](auto& watcher) { watcher.unmask(3); },
                                     [](auto& watcher) { watcher.tell_ending(1); },
                                     [](auto& watcher) { watcher.finish(); }};
  for (const Work work : works) {
    ToldGroup group;
    group[0].state.looking = 1;
    group[0].mask = {0, 0, 0, 1};
    group[0].state.mask_version = 2;
    group.say(1, 0, 1);
    auto watcher = group[0].watch({LowLatencyKind::dispatch, 0, 0, 0}, group.now);
    in_kernel([&] { work(watcher); });
    EXPECT_EQ(group[0].faults[0].kind, FaultKind::timeout);
    EXPECT_EQ(group[0].faults[0].wanted, Wanted::low_latency_look);
    EXPECT_EQ(group[0].faults[0].peer, 0);
    EXPECT_EQ(group[0].mask, (ToldMasks{0, 0, 0, 1}));
    EXPECT_EQ(group[0].queues[2].doorbell, 0u);
    EXPECT_EQ(group[0].state.looking, 1u);
  }
}

TEST(LowLatencyNews, WaitsForTheQueuePairsToAMaskedRankEnd) {
  ToldGroup group;
  group[0].begin(group.now);
  group.say(1, 0, 3);
  group.pass(kNewsDeadline / 2);
  EXPECT_NE(group[0].told[3].stopped[0], 0u);
  EXPECT_EQ(group[0].told[2].stopped[0], 0u);
}

TEST(LowLatencyNews, WaitsForAllQueuePairsEndWithTheCall) {
  ToldGroup group;
  group[0].begin(group.now);
  group.pass(kNewsDeadline / 4);
  EXPECT_EQ(group[0].told[2].stopped[0], 0u);
  group.say(1, 0, 0);
  group.pass(kNewsDeadline / 4);
  EXPECT_TRUE(group[0].given_up());
  for (const int far : {2, 3}) {
    EXPECT_NE(group[0].told[static_cast<std::size_t>(far)].stopped[0], 0u) << "rank " << far;
    MaskOrEnd{group[0].params}.blame_queue(group[0].pairs[static_cast<std::size_t>(far)].queue);
  }
  EXPECT_EQ(group[0].mask, ToldMasks{}) << "a wait that has been ended blames nobody";
}

TEST(LowLatencyNews, WhatADispatchOwes) {
  for (const int lanes : {1, 4}) {
    for (const std::uint32_t rows : {0u, 1u, 2u, 5u}) {
      ToldGroup group;
      ToldRank& rank = group[0];
      rank.params.lanes = lanes;
      const LowLatencyWindow& window = rank.params.window;
      LowLatencyDispatchParams params{};
      params.common = rank.params;
      params.phase = LowLatencyPhase::both;
      const device::low_latency::DispatchDebts debts(params, {.send = 3, .receive = 3});
      const auto told = [&](int lane) -> std::uint64_t& {
        return *window.progress(LowLatencyKind::dispatch, 3, 2, lane).in(rank.params.local);
      };
      EXPECT_EQ(debts.rows_of(2).wanted, Wanted::low_latency_dispatch_counts);
      const device::low_latency::CountHead head{rows, 0, 0};
      device::store_cell(window.counts(3, 2).in(rank.params.local), head.packed(), 3);
      told(0) = LowLatencyMailbox::progress_value(3, 0);
      for (std::uint32_t row = 0; row < rows; ++row) {
        EXPECT_EQ(debts.rows_of(2).wanted, Wanted::low_latency_dispatch_rows) << rows << " " << row;
        told(static_cast<int>(row) % lanes) = LowLatencyMailbox::progress_value(3, static_cast<int>(row) + 1);
      }
      EXPECT_EQ(debts.rows_of(2).wanted, Wanted::nothing) << rows << " rows, " << lanes << " lanes";
      params.phase = LowLatencyPhase::send;
      const device::low_latency::DispatchDebts of_send(params, {.send = 4, .receive = 4});
      EXPECT_EQ(of_send.rows_of(2).wanted, Wanted::nothing);
    }
  }
}

TEST(LowLatencyNews, WhatACombineOwes) {
  ToldGroup group;
  ToldRank& rank = group[0];
  rank.params.lanes = 2;
  const LowLatencyWindow& window = rank.params.window;
  // Two experts on each rank. Rank 2 has parts in tokens 0, 1 and 3; rank 3 in none.
  const std::array<std::int64_t, 10> topk = {4, -1, 5, 0, 1, -1, 4, 2, 0, 99};
  LowLatencyCombineParams params{};
  params.common = rank.params;
  params.phase = LowLatencyPhase::both;
  params.num_tokens = 5;
  params.num_topk = 2;
  params.num_local_experts = 2;
  params.topk_idx = {topk.data(), true};
  const device::low_latency::CombineDebts debts(params, {.send = 2, .receive = 2});
  constexpr LowLatencyKind kCombine = LowLatencyKind::combine;
  const auto told = [&](int peer, int lane) -> std::uint64_t& {
    return *window.progress(kCombine, 2, peer, lane).in(rank.params.local);
  };
  for (const int peer : {2, 3}) {
    EXPECT_EQ(debts.rows_of(peer).wanted, Wanted::low_latency_combine_selection);
    *window.begun(kCombine, peer).in(rank.params.local) = 2;
    EXPECT_EQ(debts.rows_of(peer).wanted, Wanted::low_latency_combine_selection) << "it has begun, not said which";
    told(peer, 0) = LowLatencyMailbox::progress_value(2, 0);
  }
  EXPECT_EQ(debts.rows_of(3).wanted, Wanted::nothing);
  EXPECT_EQ(debts.rows_of(2).wanted, Wanted::low_latency_combine_rows);
  told(2, 1) = LowLatencyMailbox::progress_value(2, 2);
  EXPECT_EQ(debts.rows_of(2).wanted, Wanted::low_latency_combine_rows) << "of token 3";
  told(2, 1) = LowLatencyMailbox::progress_value(2, 4);
  EXPECT_EQ(debts.rows_of(2).wanted, Wanted::low_latency_combine_rows) << "of token 0, on the other lane";
  told(2, 0) = LowLatencyMailbox::progress_value(2, 1);
  EXPECT_EQ(debts.rows_of(2).wanted, Wanted::nothing);
  params.phase = LowLatencyPhase::send;
  EXPECT_EQ(device::low_latency::CombineDebts(params, {.send = 2, .receive = 1}).rows_of(2).wanted, Wanted::nothing);
}

}  // namespace
}  // namespace deep_ep::test
