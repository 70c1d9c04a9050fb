// What kernels/common offers to all families, on every executor.
#include <gtest/gtest.h>

#include "kernels/common/carver.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/primitives/numeric.hpp"
#include "tests/kernels/probes/common_probe.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using probes::CallParams;
using probes::WaitParams;

TEST(Topk, OnlyExpertsThatExistAreNamed) {
  EXPECT_EQ(expert_of(0, 8), 0);
  EXPECT_EQ(expert_of(7, 8), 7);
  EXPECT_EQ(expert_of(8, 8), -1);
  EXPECT_EQ(expert_of(-1, 8), -1);
  EXPECT_EQ(expert_of((std::int64_t{1} << 32) + 1, 8), -1);
}

struct Wait {
  explicit Wait(Executor& executor)
      : faults(executor, 2),
        abort(executor, 1),
        signal(executor, 1),
        payload(executor, 1),
        returned(executor, 64),
        words(executor, 1),
        control(executor, 1) {
    control[0].words = words.data();
    control[0].rank = 5;
    control[0].num_ranks = 6;
    control[0].step_ns = ~std::uint64_t{0};
  }

  WaitParams params(std::uint64_t timeout_ns) const {
    return {.wait = {faults.data(), abort.data(), timeout_ns, control.data()},
            .signal = signal.data(),
            .expected = 5,
            .value = 0,
            .payload = payload.data(),
            .returned = returned.data()};
  }

  /// The host says that nothing comes of `rank` any more.
  void lose(int rank) const {
    words[0].lost[rank] = static_cast<std::uint32_t>(rank) + 1;
    words[0].changes = 1;
  }

  void leave(int rank) const { words[0].left[rank] = words[0].changes = 1; }

  Shared<FaultRecord> faults;
  Shared<std::uint64_t> abort, signal;
  Shared<std::uint32_t> payload, returned;
  Shared<ControlWords> words;
  Shared<ControlState> control;
};

const TestKernel<WaitParams>& wait_probe() {
  static const TestKernel<WaitParams> kernel(DEEP_EP_TEST_LAUNCHERS(wait_probe));
  return kernel;
}

TEST(Numbers, FiniteMagnitudesAreAboveAllOthersWhereTheyAreRaised) {
  const auto both = [](std::uint16_t low, std::uint16_t high, std::uint32_t raised) {
    const std::uint32_t pair = device::bf16_magnitudes(std::uint32_t{high} << 16 | low, raised);
    return std::pair(pair & 0xffff, pair >> 16);
  };
  constexpr std::uint32_t kRaised = device::kBf16RaisesFinite;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto one = static_cast<std::uint16_t>(bits);
    const std::uint32_t magnitude = bits & 0x7fff;
    EXPECT_EQ(both(one, 0xffff, 0), std::pair(magnitude, 0x7fffu));
    const auto [zero, raised] = both(0, one, kRaised);
    EXPECT_EQ(zero, kRaised);
    if (magnitude < 0x7f80) {
      EXPECT_EQ(raised, magnitude + kRaised);
    } else {
      EXPECT_LT(raised, kRaised);
    }
  }
}

TEST(Wait, SeesWhatWasWrittenBeforeTheSignal) {
  on_every_executor([](Executor& executor) {
    const Wait wait(executor);
    WaitParams params = wait.params(0);
    params.value = 6;  // a later value also counts
    run(executor, wait_probe(), {1, 96, 0}, params);
    for (std::size_t thread = 0; thread <= 32; ++thread) ASSERT_EQ(wait.returned[thread], 2u) << "thread " << thread;
    EXPECT_EQ(wait.faults[0].written, 0u);
    EXPECT_EQ(wait.abort[0], 0u);
  });
}

TEST(Wait, ThatExpiresIsOnRecordAndCallsOffTheOthers) {
  on_every_executor([](Executor& executor) {
    const Wait wait(executor);
    WaitParams params = wait.params(50'000);
    params.value = 4;
    run(executor, wait_probe(), {1, 96, 0}, params);
    for (std::size_t thread = 0; thread <= 32; ++thread) ASSERT_EQ(wait.returned[thread], 1u) << "thread " << thread;
    const FaultRecord& fault = wait.faults[0];
    EXPECT_EQ(fault.written, 1u);
    EXPECT_EQ(fault.kind, FaultKind::timeout);
    EXPECT_EQ(fault.wanted, Wanted::counts);
    EXPECT_EQ(fault.peer, 3);
    EXPECT_EQ(fault.expected, 5u);
    EXPECT_LE(fault.seen, 4u);
    EXPECT_NE(wait.abort[0], 0u);
    EXPECT_EQ(wait.faults[1].written, 0u);
  });
}

TEST(Progress, ACallAfterWeeksIsALaterOne) {
  for (const int bits : {0, 20, 31, 32, 39}) {
    const std::uint64_t call = std::uint64_t{1} << bits;
    EXPECT_GT(Progress::at(call), Progress::at(call - 1, Progress::kMostPosition)) << bits;
    EXPECT_EQ(Progress::call_of(Progress::at(call, Progress::kMostPosition)), call) << bits;
  }
}

TEST(Wait, WithoutDeadlineLeavesWhenTheCallIsCalledOff) {
  on_every_executor([](Executor& executor) {
    const Wait wait(executor);
    wait.abort[0] = 1;
    run(executor, wait_probe(), {1, 96, 0}, wait.params(0));
    for (std::size_t thread = 0; thread <= 32; ++thread) ASSERT_EQ(wait.returned[thread], 1u) << "thread " << thread;
    EXPECT_EQ(wait.faults[0].written, 0u);
  });
}

TEST(Wait, ForWhatIsThereDoesNotAskWhoIsLost) {
  on_every_executor([](Executor& executor) {
    const Wait wait(executor);
    wait.lose(3);
    wait.signal[0] = 6;
    wait.payload[0] = 42;
    run(executor, wait_probe(), {1, 96, 0}, wait.params(0));
    for (std::size_t thread = 0; thread <= 32; ++thread) ASSERT_EQ(wait.returned[thread], 2u) << "thread " << thread;
    EXPECT_EQ(wait.faults[0].written, 0u);
    EXPECT_EQ(wait.words[0].ended, 0u);
  });
}

TEST(Wait, ForARankThatHasLeftEnds) {
  on_every_executor([](Executor& executor) {
    const Wait wait(executor);
    wait.leave(3);
    run(executor, wait_probe(), {1, 96, 0}, wait.params(0));
    for (std::size_t thread = 0; thread <= 32; ++thread) ASSERT_EQ(wait.returned[thread], 1u) << "thread " << thread;
    EXPECT_EQ(wait.faults[0].kind, FaultKind::timeout);
    EXPECT_EQ(wait.faults[0].peer, 3);
  });
}

/// Whichever lane is the first to find that the time is over, what is missing is on record: a wait that ends without
/// that leaves all others of the rank waiting for ever.
TEST(Wait, AWarpThatServesNodesEnds) {
  const TestKernel<probes::ServeParams> kernel(DEEP_EP_TEST_LAUNCHERS(serve_probe));
  enum class Why { lost_rank, late, called_off };
  for (const Why why : {Why::lost_rank, Why::late, Why::called_off}) {
    on_every_executor([&](Executor& executor) {
      const Wait wait(executor);
      if (why == Why::lost_rank) wait.lose(1);
      if (why == Why::called_off) wait.abort[0] = 1;
      const WaitContext context = wait.params(why == Why::late ? 50'000 : 0).wait;
      run(executor, kernel, {1, 32, 64}, {context, wait.signal.data(), wait.returned.data()});
      for (std::size_t lane = 0; lane < 32; ++lane) ASSERT_EQ(wait.returned[lane], 1u) << "lane " << lane;
      EXPECT_EQ(wait.faults[0].written, why == Why::called_off ? 0u : 1u);
      if (why == Why::lost_rank) {
        EXPECT_EQ(wait.faults[0].peer, 1);
      }
      EXPECT_NE(wait.abort[0], 0u);
    });
  }
}

TEST(WholeBlock, HearsOfEachThreadThatIsNotGood) {
  const TestKernel<probes::WholeBlockParams> kernel(DEEP_EP_TEST_LAUNCHERS(whole_block_probe));
  on_every_executor([&](Executor& executor) {
    for (const int odd : {-1, 0, 40, 95}) {
      const Shared<std::uint32_t> returned(executor, 96);
      run(executor, kernel, {1, 96, 64}, {odd, returned.data()});
      for (std::size_t thread = 0; thread < 96; ++thread) ASSERT_EQ(returned[thread], odd < 0 ? 1u : 0u) << odd;
    }
  });
}

TEST(Wait, ZeroIsNoDeadline) {
  FaultRecord faults[2] = {};
  std::uint64_t abort = 0;
  WaitContext context{.fault = faults, .abort = &abort};
  const device::Awaited awaited{0, Wanted::counts, 1};
  device::Poll poll;
  EXPECT_FALSE(device::ReportLate{context}.ends(awaited, poll));
  context.timeout_ns = 1;
  EXPECT_TRUE(device::ReportLate{context}.ends(awaited, poll));
  EXPECT_FALSE(device::ReportLate{context}.ends({0, Wanted::nothing, 0}, poll));
}

TEST(Faults, TheFirstOneIsKept) {
  FaultRecord record{};
  for (const int peer : {3, 5}) {
    device::write_record(record, FaultKind::timeout, Wanted::counts, peer, 0, 17, static_cast<std::uint64_t>(peer));
  }
  EXPECT_EQ(record.peer, 3);
  EXPECT_EQ(record.seen, 3u);
  EXPECT_EQ(record.written, 1u);
}

TEST(Call, CountsUnlessItIsCalledOff) {
  const TestKernel<CallParams> kernel(DEEP_EP_TEST_LAUNCHERS(call_probe));
  on_every_executor([&](Executor& executor) {
    constexpr int kBlocks = 5;
    const Wait wait(executor);
    Shared<CallCounter> counter(executor, 1);
    Shared<std::uint64_t> epochs(executor, kBlocks);
    Shared<std::uint32_t> finished(executor, 1);
    const CallParams params{counter.data(), wait.params(0).wait, epochs.data(), finished.data()};
    const std::uint64_t aborted[] = {0, 0, 1, 0};
    const std::uint64_t expected[] = {1, 2, 0, 3};
    for (std::uint32_t call = 0; call < 4; ++call) {
      wait.abort[0] = aborted[call];
      run(executor, kernel, {kBlocks, 64, 128}, params);
      for (std::size_t block = 0; block < kBlocks; ++block) ASSERT_EQ(epochs[block], expected[call]) << "call " << call;
      EXPECT_EQ(finished[0], call + 1);
      EXPECT_EQ(counter[0].arrived, 0u);
    }
    EXPECT_EQ(counter[0].calls, 3u);
  });
}

}  // namespace
}  // namespace deep_ep::test
