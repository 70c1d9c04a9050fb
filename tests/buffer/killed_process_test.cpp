// A process is killed while calls run: the others raise an error that names its rank, long before the time-out.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "tests/cluster/fixture.hpp"

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
};
DEEP_EP_ON_PROCESSES(KilledProcessTest);

/// In normal mode of one node, at any moment. All kinds of calls in all topologies, with masks and without:
/// tests/faults. A child that holds its descriptors: tests/control.
TEST_P(KilledProcessTest, IsNamed) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const Case one = make_case({.tokens = {19, 12, 33, 7}});
  ClusterOptions options = cluster(kRanks);
  options.lost_ranks = {kVictim};
  run_cluster(options, [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .timeout_s = long_timeout()});
    const auto calls = [&] {
      run_round(rank, buffer, one);
      rank.release();
    };
    calls();
    const std::vector<pid_t> pids = all_gather_values(*rank.bootstrap(), ::getpid());
    std::jthread beside;
    if (rank.rank() == 0) beside = kill_soon(pids[kVictim]);
    auto last = Clock::now();
    require_throws<CheckFailure>(
        [&] {
          for (;; last = Clock::now()) calls();
        },
        {"in vain for rank 2", "without seeing", "the process of rank 2 has ended (process "}, "a killed process");
    const std::chrono::duration<double> waited = Clock::now() - last;
    require(waited.count() < long_timeout() / 4, "the error came after " + std::to_string(waited.count()) + " s");
    require_throws<TimeoutError>([&] { buffer.check(); }, {"the process of rank 2 has ended"}, "a later call");
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
