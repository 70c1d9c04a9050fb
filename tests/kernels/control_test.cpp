// What waits of kernels tell the control thread, and how they obey it (kernels/common/faults.hpp). The control thread
// is the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/peers.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using Policy = device::low_latency::DispatchCall<true>;

constexpr std::uint64_t kMs = 1'000'000;
constexpr int kOwn = 1;
constexpr Wanted kRows = Wanted::low_latency_dispatch_rows;

/// A look of a wait that began then.
template <class WaitPolicy>
bool ends_wait(const WaitPolicy& policy, const device::Awaited& awaited, std::uint64_t begin) {
  device::Poll poll{.begin = begin & ~device::kLeftPeerBits};
  return policy.ends(awaited, poll);
}

struct ControlledRank {
  ControlWords words{};
  ControlState control{};
  std::array<FaultRecord, 2> faults{};
  std::uint64_t abort = 0;
  WaitContext wait;

  explicit ControlledRank(bool masking = false) {
    control.words = &words;
    control.rank = kOwn;
    control.num_ranks = 4;
    control.masking = masking ? 1 : 0;
    control.step_ns = ~std::uint64_t{0};
    wait = {.fault = faults.data(), .abort = &abort, .timeout_ns = 0, .control = &control};
  }
  void lose(int rank, int by) {
    words.lost[rank] = static_cast<std::uint32_t>(by) + 1;
    ++words.changes;
  }
  void leave(int rank) {
    words.left[rank] = 1;
    ++words.changes;
  }
  /// A wait that has lasted for so long looks.
  bool looks(int peer, std::uint64_t lasted) const { return ends(peer, device::now_ns() - lasted); }
  bool ends(int peer, std::uint64_t begin) const {
    return ends_wait(device::ReportLate{wait}, {peer, kRows, 1}, begin);
  }
  /// The next wait reports at once.
  void forget_looks() { std::ranges::fill(control.looked, 0); }
};

TEST(Control, AShortWaitNeitherReportsNorHears) {
  ControlledRank rank;
  rank.lose(3, 3);
  EXPECT_FALSE(rank.looks(3, 1 * kMs));
  EXPECT_EQ(rank.words.beats[3], 0u);
  EXPECT_EQ(rank.control.looked[3], 0u);
  EXPECT_TRUE(rank.looks(3, 20 * kMs));
}

TEST(Control, AWaitReportsOnceAMillisecond) {
  ControlledRank rank;
  const std::uint64_t begin = device::now_ns() - 20 * kMs;
  EXPECT_FALSE(rank.ends(3, begin));
  const std::uint32_t beat = rank.words.beats[3];
  const std::uint64_t looked = rank.control.looked[3];
  EXPECT_NE(beat, 0u);
  EXPECT_GE(rank.words.waits[3], 20 * kMs);
  EXPECT_EQ(rank.words.wanted[3], static_cast<std::uint32_t>(kRows));
  while (device::now_ns() < looked + kMs) {
  }
  rank.control.looked[3] = device::now_ns() + 60'000 * kMs;  // another thread has just looked
  EXPECT_FALSE(rank.ends(3, begin));
  EXPECT_EQ(rank.words.beats[3], beat);
  rank.control.looked[3] = looked - 2 * kMs;
  EXPECT_FALSE(rank.ends(3, begin));
  EXPECT_NE(rank.words.beats[3], beat);
  for (const int other : {0, 2}) EXPECT_EQ(rank.words.beats[other], 0u);
}

TEST(Control, AWaitForThisRankItselfIsNotReported) {
  ControlledRank rank;
  EXPECT_FALSE(rank.looks(kOwn, 20 * kMs));
  EXPECT_EQ(rank.words.beats[kOwn], 0u);
}

TEST(Control, AWaitEndsWhenNothingComesOfItsPeer) {
  ControlledRank rank;
  rank.lose(2, 3);
  EXPECT_FALSE(rank.looks(0, 20 * kMs)) << "it may still come";
  EXPECT_TRUE(rank.looks(2, 20 * kMs)) << "another wait has heard of it";
  EXPECT_EQ(rank.control.seen, 1u);
  rank.lose(0, 3);
  rank.forget_looks();
  EXPECT_TRUE(rank.looks(0, 20 * kMs));
  EXPECT_EQ(rank.control.seen, 2u);
}

/// The peer's last stores may become visible after the look that hears that it has left.
TEST(Control, AWaitForARankThatHasLeftEndsAtTheNextLook) {
  ControlledRank rank;
  rank.leave(2);
  rank.leave(3);
  const device::ReportLate policy{rank.wait};
  device::Poll poll{.begin = (device::now_ns() - 20 * kMs) & ~device::kLeftPeerBits};
  EXPECT_FALSE(policy.ends({3, kRows, 1}, poll));
  EXPECT_FALSE(policy.ends({0, kRows, 1}, poll)) << "it may still come";
  EXPECT_EQ(rank.faults[0].written, 0u);
  poll.begin |= poll.left;
  EXPECT_FALSE(policy.ends({2, kRows, 1}, poll)) << "the look before was for another rank";
  EXPECT_TRUE(policy.ends({3, kRows, 1}, poll));
  EXPECT_EQ(rank.faults[0].peer, 3);
  EXPECT_EQ(rank.words.ended, 3u + 1);
}

TEST(Control, OwnDeadlinesComeLater) {
  ControlledRank rank;
  rank.wait.timeout_ns = 500 * kMs;
  EXPECT_FALSE(rank.looks(3, 400 * kMs));
  rank.forget_looks();
  EXPECT_TRUE(rank.looks(3, 600 * kMs));
}

/// All threads of a rank that has stood still find their waits over.
TEST(Control, ARankThatHasStoodStillAccusesNobody) {
  ControlledRank rank;
  rank.wait.timeout_ns = 500 * kMs;
  rank.control.step_ns = 100 * kMs;
  std::uint64_t begin = device::now_ns() - 5000 * kMs;
  EXPECT_FALSE(rank.ends(3, begin));
  EXPECT_EQ(rank.words.waits[3], 100 * kMs);
  int looks = 1;
  do {
    rank.control.looked[3] -= 1000 * kMs;
    begin -= 1000 * kMs;
    ++looks;
  } while (looks < 100 && !rank.ends(3, begin));
  EXPECT_EQ(looks, 6);
  EXPECT_EQ(rank.words.waits[3], 600 * kMs);
}

TEST(Control, AnEarlierWaitForThePeerDoesNotCount) {
  ControlledRank rank;
  EXPECT_FALSE(rank.looks(3, 5000 * kMs));
  rank.control.looked[3] -= 1000 * kMs;
  EXPECT_FALSE(rank.looks(3, 20 * kMs)) << "it began after the last look";
  const std::uint64_t counted = rank.control.counted[3];
  EXPECT_GE(counted, 20 * kMs);
  EXPECT_LT(counted, 900 * kMs);

  // One that began before the last look of another wait counts from its own beginning.
  rank.control.counted[3] = 60'000 * kMs;
  rank.control.looked[3] -= 2 * kMs;
  EXPECT_FALSE(rank.looks(3, 20 * kMs));
  EXPECT_GE(rank.words.waits[3], 20 * kMs);
  EXPECT_LT(rank.words.waits[3], 50'000 * kMs);
}

TEST(Control, AVerdictMovesTheVersionOnBothSidesOfTheMask) {
  ControlledRank rank(true);
  rank.lose(0, 0);
  rank.lose(3, 3);
  EXPECT_FALSE(rank.looks(2, 20 * kMs)) << "any wait hears of all";
  EXPECT_EQ(rank.control.version, 4u);
  EXPECT_TRUE(device::is_lost(rank.control, 0) && device::is_lost(rank.control, 3));
  EXPECT_FALSE(device::is_lost(rank.control, 2));
  device::take_verdict(rank.wait);
  EXPECT_EQ(rank.control.version, 4u) << "once";
}

TEST(Control, ARankThatTheOthersGoOnWithoutEndsItsCalls) {
  for (const bool masking : {false, true}) {
    ControlledRank rank(masking);
    rank.lose(kOwn, 2);
    EXPECT_FALSE(rank.looks(3, 20 * kMs));
    EXPECT_EQ(rank.abort, masking ? 1u : 0u);
    EXPECT_FALSE(device::is_lost(rank.control, kOwn));
    EXPECT_EQ(rank.faults[0].claimed, 0u) << "the host knows why";
    rank.abort = 0;
    rank.forget_looks();
    EXPECT_FALSE(rank.looks(3, 20 * kMs));
    EXPECT_EQ(rank.abort, masking ? 1u : 0u) << "also in calls that another abort word ends";
  }
}

TEST(Control, OthersHearOfWhatEndsTheCallsOfARank) {
  const auto ended = [](FaultKind kind, Wanted wanted) {
    ControlledRank rank;
    device::report_fault(rank.wait, kind, wanted, 3, 7, 0, 0);
    EXPECT_EQ(rank.abort, 1u);
    EXPECT_EQ(rank.words.failed[3], kind == FaultKind::rdma_failed ? 7u + 1 : 0u);
    return static_cast<int>(rank.words.ended) - 1;
  };
  EXPECT_EQ(ended(FaultKind::timeout, Wanted::counts), 3);
  EXPECT_EQ(ended(FaultKind::rdma_failed, Wanted::rdma_completion), 3);
  EXPECT_EQ(ended(FaultKind::mismatch, Wanted::low_latency_dispatch_counts), kOwn);
  EXPECT_EQ(ended(FaultKind::mismatch, Wanted::counts), -1) << "all ranks find it, and go on";
  ControlledRank rank;
  device::report_fault(rank.wait, FaultKind::timeout, kRows, 3, 0, 0, 0);
  device::report_fault(rank.wait, FaultKind::timeout, kRows, 2, 0, 0, 0);
  EXPECT_EQ(rank.words.ended, 3u + 1) << "the first one, which is on record";
}

TEST(Control, AFailedQueuePairMaySpareTheCall) {
  ControlledRank rank(true);
  rank.wait.spares_call = true;
  device::report_fault(rank.wait, FaultKind::rdma_failed, Wanted::rdma_completion, 3, 7, 0, 0);
  EXPECT_EQ(rank.words.failed[3], 7u + 1);
  EXPECT_EQ(rank.words.ended, 0u);
  EXPECT_EQ(rank.abort, 0u);
  EXPECT_EQ(rank.faults[0].claimed, 0u);
}

/// With masking; `mask`: of rank 3.
struct MaskingRank : ControlledRank {
  LowLatencyParams params;

  MaskingRank() : ControlledRank(true) {
    params.rank = kOwn;
    params.num_ranks = 4;
    params.wait = wait;
    params.wait.timeout_ns = 1000 * kMs;
    params.mask = control.mask;
  }
};

TEST(Control, WithMaskingNoWaitMasksByItself) {
  MaskingRank rank;
  const Policy policy{rank.params, 1, 0};
  const device::Awaited rows{3, kRows, 1};
  EXPECT_FALSE(ends_wait(policy, rows, device::now_ns() - 900 * kMs));
  EXPECT_FALSE(policy.called_off(rows));
  rank.lose(3, 3);
  rank.forget_looks();
  EXPECT_TRUE(ends_wait(policy, rows, device::now_ns() - 900 * kMs));
  EXPECT_TRUE(policy.called_off(rows));
  EXPECT_EQ(rank.abort, 0u) << "the call goes on without it";
}

TEST(Control, WithMaskingAWaitMasksARankThatHasLeft) {
  MaskingRank rank;
  rank.leave(3);
  const Policy policy{rank.params, 1, 0};
  device::Poll poll{.begin = (device::now_ns() - 20 * kMs) & ~device::kLeftPeerBits};
  EXPECT_FALSE(policy.ends({3, kRows, 1}, poll));
  EXPECT_FALSE(device::low_latency::masked(rank.params, 3));
  poll.begin |= poll.left;
  EXPECT_TRUE(policy.ends({3, kRows, 1}, poll));
  EXPECT_TRUE(device::low_latency::masked(rank.params, 3));
  EXPECT_EQ(rank.control.version, 2u) << "blocks that have received with it receive again";
  EXPECT_EQ(rank.abort, 0u) << "the call goes on without it";
}

TEST(Control, WithMaskingRanksThatMixUpTheirCallsDoNotWaitForEver) {
  MaskingRank rank;
  const Policy policy{rank.params, 1, 0};
  const device::Awaited rows{3, kRows, 1};
  ASSERT_TRUE(ends_wait(policy, rows, device::now_ns() - 1100 * kMs));
  EXPECT_EQ(rank.abort, 1u);
  EXPECT_EQ(rank.faults[0].kind, FaultKind::timeout);
  EXPECT_EQ(rank.faults[0].peer, 3);
  EXPECT_EQ(rank.faults[0].field, kMostTimeouts);
  EXPECT_EQ(rank.words.ended, 3u + 1);
}

/// No poster looks at it any more: its kernel has ended.
/// The peer may wait for rank 3, which waits in vain for what this rank has sent it.
TEST(Control, AWaitFindsAFailedQueuePairToAnyRank) {
  std::array<device::rdma::CompletionEntry, 8> entries{};
  std::array<RdmaQueuePair, 8> pairs{};
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    entries[i].tail = device::rdma::tail_word(1, device::rdma::kCompletionOk);
    pairs[i].completion = &entries[i];
  }
  device::rdma::CompletionEntry& of_combine = entries[static_cast<std::size_t>(LowLatencyKind::combine) * 4 + 3];
  of_combine.tail = device::rdma::tail_word(1, device::rdma::kCompletionError);
  of_combine.syndrome = 0x13;
  for (const bool masking : {false, true}) {
    MaskingRank rank;
    rank.params.peers = pairs.data();
    if (!masking) rank.params.mask = nullptr;
    for (const bool far : {false, true}) {
      if (far) rank.params.set_far(3);
      for (int look = 0; look < 4; ++look) {
        EXPECT_EQ(rank.words.failed[3], 0u) << look;
        rank.forget_looks();
        EXPECT_FALSE(ends_wait(Policy{rank.params, 1, 0}, {0, kRows, 1}, device::now_ns() - 20 * kMs));
      }
      EXPECT_EQ(rank.words.failed[3] != 0, far);
    }
    EXPECT_EQ(RdmaFailure::unpack(rank.words.failed[3] - 1).syndrome, 0x13u);
  }
}

TEST(Control, TheProgramAndTheVerdictMaskEachForItself) {
  for (const auto& executor : executors_present()) {
    Shared<ControlWords> words(*executor, 1);
    Shared<ControlState> control(*executor, 1);
    Shared<FaultRecord> faults(*executor, 2);
    Shared<std::uint64_t> abort(*executor, 1);
    Shared<std::int32_t> status(*executor, 4);
    control[0].words = words.data();
    control[0].rank = kOwn;
    control[0].num_ranks = 4;
    control[0].masking = 1;
    const WaitContext wait{faults.data(), abort.data(), 0, control.data()};
    const StreamHandle stream = executor->create_stream();
    const auto step = [&](LowLatencyMasksStep what, int rank = -1) {
      const LowLatencyMasksParams params{.wait = wait, .step = what, .rank = rank, .status = status.data()};
      dynamic_cast<Backend&>(*executor).kernels().masks_low_latency(params, {1, 64, 0}, stream);
      executor->synchronize(stream);
    };
    const auto query = [&] {
      step(LowLatencyMasksStep::query);
      return std::vector<std::int32_t>{status[0], status[1], status[2], status[3]};
    };
    using Masks = std::vector<std::int32_t>;
    EXPECT_EQ(query(), (Masks{0, 0, 0, 0}));
    step(LowLatencyMasksStep::mask, 2);
    EXPECT_EQ(query(), (Masks{0, 0, 1, 0}));
    words[0].lost[2] = words[0].lost[3] = 1;
    words[0].changes = 1;
    EXPECT_EQ(query(), (Masks{0, 0, 1, 1})) << "verdicts that have come count";
    step(LowLatencyMasksStep::unmask, 3);
    step(LowLatencyMasksStep::unmask);
    EXPECT_EQ(query(), (Masks{0, 0, 1, 1})) << "the program undoes no verdict";
    words[0].lost[0] = 1;
    step(LowLatencyMasksStep::mask, 3);
    EXPECT_EQ(query(), (Masks{0, 0, 1, 1})) << "nothing has changed";
    words[0].changes = 2;
    EXPECT_EQ(query(), (Masks{1, 0, 1, 1}));
    EXPECT_EQ(control[0].mask[2], kMaskedByVerdict);
    EXPECT_EQ(control[0].mask[3], kMaskedByProgram + kMaskedByVerdict);
    executor->destroy_stream(stream);
  }
}

}  // namespace
}  // namespace deep_ep::test
