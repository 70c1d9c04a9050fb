// A process is killed while calls run: the others raise an error that names its rank, long before the time-out.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/rank_processes.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 4;
constexpr int kVictim = 2;

/// Nobody waits so long who is told.
double long_timeout() { return std::min(scaled(60), cluster_patience() / 2); }

using Clock = std::chrono::steady_clock;

/// Kills it at a random moment.
std::jthread kill_soon(pid_t pid) {
  return std::jthread([pid] {
    std::mt19937 random(static_cast<unsigned>(pid));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    ::kill(pid, SIGKILL);
  });
}

class KilledProcessTest : public ClusterTest {
 protected:
  bool processes_have_threads() const override { return true; }

  /// Makes calls of a rank until one throws.
  using Calls = std::function<void(Rank&, Buffer&)>;
  void expect_to_be_named(
      const BufferOptions& chosen, const Calls& calls, const std::function<void()>& victim_begins = [] {}) {
    ClusterOptions options = cluster(kRanks);
    options.lost_ranks = {kVictim};
    run_cluster(options, [&](Rank& rank) {
      BufferOptions with_timeout = chosen;
      with_timeout.timeout_s = long_timeout();
      Buffer& buffer = rank.buffer(with_timeout);
      calls(rank, buffer);
      if (rank.rank() == kVictim) victim_begins();
      const std::vector<pid_t> pids = all_gather_values(*rank.bootstrap(), ::getpid());
      std::jthread beside;
      if (rank.rank() == 0) beside = kill_soon(pids[kVictim]);
      auto last = Clock::now();
      require_throws<TimeoutError>(
          [&] {
            for (;; last = Clock::now()) calls(rank, buffer);
          },
          {"in vain for rank 2", "without seeing", "the process of rank 2 has ended (process "}, "a killed process");
      const std::chrono::duration<double> waited = Clock::now() - last;
      require(waited.count() < long_timeout() / 4, "the error came after " + std::to_string(waited.count()) + " s");
      require_throws<TimeoutError>([&] { calls(rank, buffer); }, {"the process of rank 2 has ended"}, "a later call");
      buffer.destroy();
    });
  }
};
DEEP_EP_ON_PROCESSES(KilledProcessTest);

class KilledLowLatencyProcessTest : public KilledProcessTest {};
INSTANTIATE_TEST_SUITE_P(On, KilledLowLatencyProcessTest, testing::ValuesIn(kLowLatencyProcesses), name_of_place);

/// The calls that a rank makes again and again; all ranks have the same case.
struct NormalMode {
  Case one;
  bool heap = true;

  void operator()(Rank& rank, Buffer& buffer) const {
    const Inputs inputs = upload_inputs(rank, one);
    const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
    const Returned returned = upload_returned(rank, buffer, one, result.handle, heap);
    buffer.combine(returned.combine, rank.call());
    buffer.check();
    rank.release();
  }
};

struct LowLatencyCalls {
  LowLatencyCombineCase one;

  void operator()(Rank& rank, Buffer& buffer) const {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    buffer.low_latency_combine(upload_combine(rank, one, handle), rank.call());
    buffer.check();
    rank.release();
  }
};

TEST_P(KilledProcessTest, IsNamedInNormalMode) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  expect_to_be_named({.heap_bytes = std::size_t{16} << 20}, NormalMode{make_case({.tokens = {19, 12, 33, 7}})});
}

TEST_P(KilledProcessTest, IsNamedBetweenNodes) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const NormalMode calls{make_case({.tokens = {19, 12, 33, 7}, .ranks_per_node = 2}), false};
  expect_to_be_named({.heap_bytes = std::size_t{32} << 20, .ranks_per_node = 2}, calls);
}

TEST_P(KilledProcessTest, IsNamedThoughAChildHoldsItsDescriptors) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const auto fork_child = [] {
    if (::fork() != 0) return;
    const pid_t test = rank_process().parent;  // the child lives as long
    while (::kill(test, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::_exit(0);
  };
  expect_to_be_named({.heap_bytes = std::size_t{16} << 20}, NormalMode{make_case({.tokens = {19, 12, 33, 7}})},
                     fork_child);
}

TEST_P(KilledLowLatencyProcessTest, IsNamedInLowLatencyCalls) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const LowLatencyCalls calls{make_low_latency_combine_case(
      {.tokens = {7, 4, 8, 5}, .max_tokens = 8, .hidden = 512, .topk = 4, .format = oracle::RowFormat::bf16})};
  expect_to_be_named(low_latency_options(kRanks, 8, 512), calls);
}

/// With masks the calls of the others go on: each has all of what the process sent, or nothing of it.
TEST_P(KilledLowLatencyProcessTest, IsMaskedInTheMiddleOfCalls) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  constexpr int kCalls = 60;
  const LowLatencyCase all =
      make_low_latency_case({.tokens = {5, 4, 6, 3}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3});
  const LowLatencyCase without = with_masks(all, masks_without(kRanks, kVictim));
  ClusterOptions options = cluster(kRanks);
  options.lost_ranks = {kVictim};
  run_cluster(options, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(kRanks, 6, 256, long_timeout(), true));
    dispatch_and_check(rank, buffer, all);
    rank.bootstrap()->barrier();
    std::atomic<int> calls{0};
    std::thread killer;
    if (rank.rank() == kVictim) {
      killer = std::thread([&] {
        std::mt19937 random(static_cast<unsigned>(::getpid()));
        const int last = static_cast<int>(random() % (kCalls / 2));
        while (calls < last) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 2'000));
        ::raise(SIGKILL);
      });
    }
    bool lost = false;
    const auto begin = std::chrono::steady_clock::now();
    for (; calls < kCalls; ++calls) {
      const LowLatencyDispatchResult result = buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call());
      try {
        check_low_latency_dispatch(rank, lost ? without : all, result);
      } catch (const CheckFailure&) {
        if (lost) throw;
        check_low_latency_dispatch(rank, without, result);
        lost = true;
      }
      buffer.check();
      rank.release();
    }
    require(lost, "a killed process is left out");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    require(took.count() < long_timeout() / 2, "the calls took " + std::to_string(took.count()) + " s");
    const TensorView status = rank.upload(std::vector<std::int32_t>(kRanks, -1), DType::int32, {kRanks});
    buffer.low_latency_query_mask(status, rank.call().stream);
    require_same({0, 0, 1, 0}, rank.download<std::int32_t>(status), "masks");
    buffer.destroy();
  });
}

/// Ranks that end a buffer together do not wait for one that has died.
TEST_P(KilledProcessTest, IsNotWaitedForAtTheEnd) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  ClusterOptions options = cluster(kRanks);
  options.lost_ranks = {kVictim};
  options.timeout_s = long_timeout();
  run_cluster(options, [&](Rank& rank) {
    Buffer buffer = rank.own_buffer();
    rank.bootstrap()->barrier();
    if (rank.rank() == kVictim) ::raise(SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    buffer.destroy();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    require(waited.count() < long_timeout() / 4, "destroy took " + std::to_string(waited.count()) + " s");
  });
}

}  // namespace
}  // namespace deep_ep::test
