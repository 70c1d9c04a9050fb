// An error that one rank alone has seen: that rank destroys its buffer alone, the others destroy theirs together, and
// all make a new one.
#include <atomic>
#include <chrono>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "deep_ep/interrupt.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRounds = 4;

class RecoveryTest : public ClusterTest {
 protected:
  /// Waits, on another rank's thread, until so many rounds' errors were seen.
  static void await(const std::atomic<int>& seen, int rounds) {
    for (const Deadline deadline(long_patience()); seen.load() < rounds;) {
      require(!deadline.expired(), "the error was not seen in time");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};
DEEP_EP_ON_THREADS(RecoveryTest);

TEST_P(RecoveryTest, ALateRankSucceedsAndTheOtherTimesOut) {
  DEEP_EP_NEEDS_RANKS(2);
  if (are_processes(GetParam())) GTEST_SKIP() << "threads tell each other when the error was seen";
  const LowLatencyCase one = make_low_latency_case({});
  std::atomic<int> seen = 0;
  run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
    for (int round = 0; round < kRounds; ++round) {
      BufferOptions options = low_latency_options(2, 4, 512);
      options.timeout_s = short_deadline() / 4;
      Buffer buffer = rank.own_buffer(options);
      const LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
      if (rank.rank() == round % 2) {
        await(seen, round + 1);
        check_low_latency_dispatch(rank, one, buffer.low_latency_dispatch(arguments, rank.call()));
        buffer.check();
      } else {
        const auto call_and_check = [&] {
          buffer.low_latency_dispatch(arguments, rank.call());
          rank.executor()->synchronize(rank.stream());
          buffer.check();
        };
        require_throws<TimeoutError>(call_and_check, {"rank " + std::to_string(round % 2)}, "a call without the other");
        ++seen;
      }
      buffer.destroy();
      require(buffer.destroyed(), "destroyed() after destroy");
    }
    Buffer buffer = rank.own_buffer(low_latency_options(2, 4, 512));
    dispatch_and_check(rank, buffer, one);
    buffer.destroy();
  });
}

/// One rank gives up where the others go on waiting, and succeed.
TEST_P(RecoveryTest, AnInterruptedRankMakesTheNextBuffer) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "on GPUs check does not wait for kernels";
  const LowLatencyCase one = make_low_latency_case({.tokens = {4, 2, 3}});
  std::atomic<int> seen = 0;
  run_cluster(cluster_with_absentees(3), [&](Rank& rank) {
    for (int round = 0; round < kRounds; ++round) {
      BufferOptions options = low_latency_options(3, 4, 512);
      options.timeout_s = long_patience();
      Buffer buffer = rank.own_buffer(options);
      const LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
      const int interrupted = round % 3;
      const int late = (round + 1) % 3;
      if (rank.rank() == late) await(seen, round + 1);
      if (rank.rank() == interrupted) {
        int questions = 0;
        const InterruptScope scope([&] { return ++questions == 3; });
        const auto call_and_check = [&] {
          buffer.low_latency_dispatch(arguments, rank.call());
          buffer.check();
        };
        require_throws<Interrupted>(call_and_check, {"interrupted"}, "a call that is given up");
        ++seen;
      } else {
        check_low_latency_dispatch(rank, one, buffer.low_latency_dispatch(arguments, rank.call()));
        buffer.check();
      }
      buffer.destroy();
    }
    Buffer buffer = rank.own_buffer(low_latency_options(3, 4, 512));
    dispatch_and_check(rank, buffer, one);
    buffer.destroy();
  });
}

/// A rank that does not come to the end of a buffer: the others say so in time, and theirs is gone.
TEST_P(RecoveryTest, DestroyIsBounded) {
  DEEP_EP_NEEDS_RANKS(2);
  if (are_processes(GetParam())) GTEST_SKIP() << "threads tell each other when the error was seen";
  std::atomic<int> seen = 0;
  ClusterOptions options = cluster(2);
  options.timeout_s = short_deadline();
  run_cluster(options, [&](Rank& rank) {
    Buffer buffer = rank.own_buffer();
    if (rank.rank() == 1) return await(seen, 1);
    const std::shared_ptr<void> whatever(nullptr, [&](void*) { ++seen; });
    require_throws<TimeoutError>([&] { buffer.destroy(); }, {"rank 0 waited", "rank 1"}, "destroy without the other");
    require(buffer.destroyed(), "destroyed() after destroy");
  });
}

}  // namespace
}  // namespace deep_ep::test
