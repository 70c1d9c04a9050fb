#include "tests/cluster/rank_processes.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "tests/cluster/meeting_point.hpp"
#include "tests/support/time_scale.hpp"

extern char** environ;

namespace deep_ep::test {
namespace {

constexpr const char* kRank = "DEEP_EP_TEST_RANK";
constexpr const char* kParent = "DEEP_EP_TEST_PARENT";
constexpr const char* kCall = "DEEP_EP_TEST_CLUSTER";
constexpr const char* kMeetingPoint = "DEEP_EP_TEST_MEETING_POINT";

/// Which call of run_cluster with processes this is, counted within the running test.
int next_call() {
  static const testing::TestInfo* test = nullptr;
  static testing::TimeInMillis started = 0;
  static int calls = 0;
  const testing::TestInfo* const now = testing::UnitTest::GetInstance()->current_test_info();
  const auto start = now->result()->start_timestamp();  // tells repetitions of a test apart
  if (now != test || start != started) calls = 0;
  test = now;
  started = start;
  return calls++;
}

Child start(int rank, int call, const std::string& meeting_point) {
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::vector<std::string> variables = {
      std::string(kRank) + "=" + std::to_string(rank), std::string(kParent) + "=" + std::to_string(getpid()),
      std::string(kCall) + "=" + std::to_string(call), std::string(kMeetingPoint) + "=" + meeting_point,
      std::string(kTimeFactorVariable) + "=" + std::to_string(time_factor())};
  // gtest's own variables would make the children share an output file or run a shard of nothing.
  for (char** one = environ; *one != nullptr; ++one) {
    if (std::strncmp(*one, "GTEST_", 6) != 0) variables.emplace_back(*one);
  }
  return start_again(
      {"rank" + std::to_string(rank), std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name(),
       "--gtest_also_run_disabled_tests"},
      variables, STDERR_FILENO);
}

std::string describe(int rank, const Child& child, bool killed) {
  if (!killed && WIFEXITED(child.status) && WEXITSTATUS(child.status) == kRankSucceeded) return {};
  std::string text = "process of rank " + std::to_string(rank);
  if (killed) {
    text += " was killed at the deadline";
  } else if (WIFSIGNALED(child.status)) {
    text += std::string(" died: ") + strsignal(WTERMSIG(child.status));
  } else {
    text += " ended with " + std::to_string(WEXITSTATUS(child.status));
  }
  return text + ": " + child.written();
}

}  // namespace

bool is_rank_process() { return std::getenv(kRank) != nullptr; }

RankProcess rank_process() {
  return {std::atoi(std::getenv(kRank)), std::atoi(std::getenv(kParent)), std::getenv(kMeetingPoint)};
}

bool is_own_cluster() { return next_call() == std::atoi(std::getenv(kCall)); }

Child start_again(std::vector<std::string> arguments, std::vector<std::string> variables, int output) {
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
  };
  Child child{.output = memfd_create("output", MFD_CLOEXEC)};
  if (child.output < 0) throw std::runtime_error(std::string("memfd_create: ") + std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, child.output, output);
  const int failed = posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr, pointers(arguments).data(),
                                 variables.empty() ? environ : pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) throw std::runtime_error(std::string("posix_spawn: ") + std::strerror(failed));
  return child;
}

std::string Child::written() const {
  std::string text(static_cast<std::size_t>(lseek(output, 0, SEEK_END)), '\0');
  const ssize_t got = pread(output, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

bool Child::end() {
  if (!ended) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
  }
  return !ended;
}

std::vector<std::string> run_processes(int ranks, const std::set<int>& lost_ranks) {
  const int call = next_call();
  const MeetingPoint meeting_point;
  std::vector<Child> children;
  for (int r = 0; r < ranks; ++r) children.push_back(start(r, call, meeting_point.path()));

  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(cluster_patience());
  int running = ranks;
  while (running > 0 && std::chrono::steady_clock::now() < deadline) {
    for (auto& child : children) {
      if (child.ended || waitpid(child.pid, &child.status, WNOHANG) != child.pid) continue;
      child.ended = true;
      --running;
    }
    if (running > 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::vector<std::string> failures;
  for (int r = 0; r < ranks; ++r) {
    Child& child = children[static_cast<std::size_t>(r)];
    const bool killed = child.end();
    failures.push_back(lost_ranks.contains(r) ? std::string() : describe(r, child, killed));
    close(child.output);
  }
  return failures;
}

}  // namespace deep_ep::test
