// What the library takes from its process and host: open files, memory, threads.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/host_memory.hpp"
#include "csrc/support/open_files.hpp"
#include "csrc/support/threads.hpp"
#include "deep_ep/error.hpp"
#include "tests/support/child_process.hpp"

namespace deep_ep::test {
namespace {

/// In a child, whose limits are its own.
bool holds_in_a_child(const std::function<bool()>& check) {
  const pid_t child = fork_child();
  if (child == 0) ::_exit(check() ? 0 : 1);
  int status = -1;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

bool limit_files(rlim_t soft, rlim_t hard) {
  const rlimit limit{.rlim_cur = soft, .rlim_max = hard};
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

rlimit file_limits() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return limit;
}

TEST(OpenFiles, TheSoftLimitIsRaisedWhereItDoesNotDo) {
  EXPECT_TRUE(holds_in_a_child([] {
    const rlim_t hard = file_limits().rlim_max;
    if (hard < 400 || !limit_files(300, hard)) return false;
    make_room_for_files(1);
    if (file_limits().rlim_cur != 300) return false;
    make_room_for_files(300);
    return file_limits().rlim_cur == hard;
  }));
}

TEST(OpenFiles, TheHardLimitNeedHoldNoReserve) {
  EXPECT_TRUE(holds_in_a_child([] {
    if (!limit_files(200, 300)) return false;
    make_room_for_files(250);
    return file_limits().rlim_cur == 300;
  }));
}

TEST(OpenFiles, AHardLimitThatIsTooSmallIsNamed) {
  EXPECT_TRUE(holds_in_a_child([] {
    if (!limit_files(200, 300)) return false;
    try {
      make_room_for_files(1000);
    } catch (const SystemError& error) {
      const std::string text = error.what();
      return text.find("got 300") != text.npos && text.find("take 1000") != text.npos &&
             text.find("ulimit -Hn") != text.npos;
    }
    return false;
  }));
}

TEST(OpenFiles, ASocketThatIsNotMadeSaysWhy) {
  for (const bool by_tcp : {false, true}) {
    EXPECT_TRUE(holds_in_a_child([by_tcp] {
      const SocketAddress at = by_tcp ? own_address({}) : unix_address("deep_ep-none");
      if (!limit_files(0, file_limits().rlim_max)) return false;
      return !listen_at(at) && errno == EMFILE && !call_at(at) && errno == EMFILE;
    })) << by_tcp;
  }
}

TEST(HostMemory, IsWhatTheHostAndTheGroupsLeave) {
  const std::filesystem::path root = std::filesystem::path(::testing::TempDir()) / "host_memory";
  std::filesystem::remove_all(root);
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  const auto available = [&] { return available_host_memory(root.string()); };
  EXPECT_EQ(available(), SIZE_MAX);
  write("proc/meminfo", "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:  5000 kB\n");
  EXPECT_EQ(available(), 5000u * 1024);
  write("proc/self/cgroup", "1:cpu:/x\n0::/jobs/one\n");
  write("sys/fs/cgroup/jobs/one/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/one/memory.current", "1000000\n");
  EXPECT_EQ(available(), 5000u * 1024);
  write("sys/fs/cgroup/jobs/memory.max", "3000000\n");
  write("sys/fs/cgroup/jobs/memory.current", "2500000\n");
  EXPECT_EQ(available(), 500'000u);
  write("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 400000\n");  // a cache, which the system takes back
  EXPECT_EQ(available(), 900'000u);
  write("sys/fs/cgroup/jobs/one/memory.max", "900000\n");
  EXPECT_EQ(available(), 0u);
  std::filesystem::remove_all(root);
}

TEST(Threads, BlockSignalsFromTheirFirstInstruction) {
  const auto blocked = [](int signal) {
    sigset_t now;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &now);
    return ::sigismember(&now, signal) == 1;
  };
  {
    const SignalsBlocked here;
    std::thread([&] {
      for (const int programs : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1}) EXPECT_TRUE(blocked(programs));
      for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) EXPECT_FALSE(blocked(own));
    }).join();
  }
  EXPECT_FALSE(blocked(SIGTERM));
}

}  // namespace
}  // namespace deep_ep::test
