// Ranks of tests that are processes end with the test program, also when that is killed: scripts/run_gtest.py and
// whoever presses Ctrl-C twice kill it.
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>

#include "tests/cluster/cluster.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 2;
constexpr const char* kAlive = "DEEP_EP_TEST_ALIVE";  ///< in ranks: the descriptor that they write to

void tell_and_stay() {
  if (::write(std::atoi(std::getenv(kAlive)), "r", 1) != 1) return;
  ::poll(nullptr, 0, static_cast<int>(1000 * 2 * long_patience()));
}

/// Bytes that can be read from `from` at once: 0 when nobody has the other end any more, nothing when none comes.
std::optional<ssize_t> read_some(int from) {
  pollfd polled{from, POLLIN, 0};
  char bytes[kRanks];
  if (::poll(&polled, 1, static_cast<int>(1000 * long_patience())) != 1) return std::nullopt;
  return ::read(from, bytes, sizeof bytes);
}

/// `start`: starts ranks that tell and stay, in a process that is killed then.
void expect_to_end_with_their_starter(const std::function<void()>& start) {
  int alive[2];
  ASSERT_EQ(::pipe2(alive, O_NONBLOCK), 0);
  const Setting variable(kAlive, std::to_string(alive[1]));
  const pid_t starter = fork_child();
  ASSERT_GE(starter, 0);
  if (starter == 0) {
    ::close(alive[0]);
    try {
      start();
    } catch (const std::exception&) {
    }
    ::_exit(1);
  }
  ::close(alive[1]);
  for (ssize_t ranks = 0; ranks < kRanks;) {
    const std::optional<ssize_t> more = read_some(alive[0]);
    ASSERT_GT(more.value_or(-1), 0) << "ranks that began: " << ranks;
    ranks += *more;
  }
  ::kill(starter, SIGKILL);
  ::waitpid(starter, nullptr, 0);
  EXPECT_EQ(read_some(alive[0]), std::optional<ssize_t>(0)) << "ranks that nobody waits for";
  ::close(alive[0]);
}

TEST(RankProcesses, EndWithTheProgramThatStartedThem) {
  const auto start = [] {
    run_cluster({.ranks = kRanks, .where = {Target::host, Placement::processes}, .host = {}},
                [](Rank&) { tell_and_stay(); });
  };
  if (is_rank_process()) return start();
  expect_to_end_with_their_starter(start);
}

TEST(RankProcesses, ForkedOnesEndWithTheProgramThatStartedThem) {
  expect_to_end_with_their_starter([] { deep_ep::run_processes(kRanks, [](int) { tell_and_stay(); }); });
}

}  // namespace
}  // namespace deep_ep::test
