#include "deep_ep/bootstrap.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <stdexcept>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep {
namespace {

using std::chrono::steady_clock;
using test::patience;
using test::scaled;

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

std::vector<std::byte> pattern(int rank, int round, std::size_t bytes) {
  std::vector<std::byte> result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    result[i] = static_cast<std::byte>(static_cast<std::size_t>(rank * 31 + round * 7) + i * 13 + i / 251);
  }
  return result;
}

// Many rounds of many sizes, zero and more than one chunk of shared memory included.
void exercise(Bootstrap& bootstrap) {
  for (int round = 0; round < 40; ++round) {
    const std::size_t bytes = round % 8 == 7 ? 50000 : static_cast<std::size_t>(round % 5) * 100;
    const std::vector<std::byte> all = bootstrap.all_gather(pattern(bootstrap.rank(), round, bytes));
    std::vector<std::byte> expected;
    for (int rank = 0; rank < bootstrap.size(); ++rank) {
      const std::vector<std::byte> part = pattern(rank, round, bytes);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    require(all == expected, "all_gather returned other bytes than the ranks gave");
    if (round % 3 == 0) bootstrap.barrier();
  }
}

std::string unique_name(const char* test) { return std::string(test) + "-" + std::to_string(::getpid()); }

std::string path_of(const std::string& name) { return "/deep_ep." + std::to_string(::geteuid()) + "." + name; }

bool name_exists(const std::string& name) {
  const int fd = ::shm_open(path_of(name).c_str(), O_RDONLY, 0);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

TEST(ThreadBootstrap, GathersInRankOrderAnyNumberOfTimes) {
  for (const int size : {1, 2, 3, 8}) {
    const auto bootstraps = make_thread_bootstraps(size, patience());
    expect_nothing_thrown(run_threads(size, [&](int rank) {
      Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
      require(bootstrap.rank() == rank && bootstrap.size() == size, "wrong rank or size");
      exercise(bootstrap);
    }));
  }
}

TEST(ThreadBootstrap, UnequalSizesAreToldToEveryRankAndTheGroupGoesOn) {
  const auto bootstraps = make_thread_bootstraps(3, patience());
  expect_nothing_thrown(run_threads(3, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    try {
      bootstrap.all_gather(pattern(rank, 0, rank == 2 ? 8 : 16));
      throw std::runtime_error("unequal sizes went through");
    } catch (const RankMismatch& error) {
      require(std::strstr(error.what(), "rank 2 brought 8") != nullptr, error.what());
    }
    exercise(bootstrap);
  }));
}

TEST(ThreadBootstrap, DeadlineNamesWhoIsMissingAndEndsTheGroup) {
  const double deadline = scaled(1);  // ranks 0 and 2 come within it, or one of them would be missed, too
  const auto bootstraps = make_thread_bootstraps(4, deadline);
  const auto begin = steady_clock::now();
  const auto errors = run_threads(4, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    bootstrap.barrier();  // all of them
    if (rank % 2 == 0) bootstrap.barrier();
  });
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_NE(errors[rank].find("for ranks 1 and 3"), std::string::npos) << errors[rank];
  }
  EXPECT_GE(seconds_since(begin), 0.95 * deadline);
  const auto late = steady_clock::now();
  EXPECT_THROW(bootstraps[1]->barrier(), TimeoutError);
  EXPECT_LT(seconds_since(late), 0.5 * deadline) << "a late rank is told at once";
}

TEST(ThreadBootstrap, WaitsAsLongAsTheEnvironmentSays) {
  const Setting timeout("DEEP_EP_TIMEOUT_S", "0.2");
  const auto begin = steady_clock::now();
  EXPECT_THROW(make_thread_bootstraps(2)[0]->barrier(), TimeoutError);
  EXPECT_LT(seconds_since(begin), 20);
}

TEST(Bootstrap, RefusesATimeoutThatIsNone) {
  for (const double timeout_s : {-1.0, std::nan(""), HUGE_VAL}) {
    for (const bool threads : {true, false}) {
      try {
        threads ? void(make_thread_bootstraps(1, timeout_s)) : void(make_shared_memory_bootstrap("x", 0, 1, timeout_s));
        FAIL() << timeout_s << " was taken for a number of seconds";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::strstr(error.what(), "timeout_s is "), nullptr) << error.what();
      }
    }
  }
}

TEST(Bootstrap, ATimeoutBelowTheLeastIsNotForEver) {
  EXPECT_EQ(timeout_in_effect(1e-10), 1e-6);
  EXPECT_EQ(timeout_in_effect(0.0), 0);
}

TEST(SharedMemoryBootstrap, ProcessesGatherAndLeaveNoNameBehind) {
  const std::string name = unique_name("gather");
  for (const int size : {1, 2, 5}) {
    expect_nothing_thrown(run_processes(size, [&](int rank) {
      const auto bootstrap = make_shared_memory_bootstrap(name, rank, size, patience());
      require(bootstrap->rank() == rank && bootstrap->size() == size, "wrong rank or size");
      exercise(*bootstrap);
    }));
    EXPECT_FALSE(name_exists(name));
  }
}

TEST(SharedMemoryBootstrap, NameMayBeUsedAgainAtOnce) {
  const std::string name = unique_name("again");
  expect_nothing_thrown(run_processes(3, [&](int rank) {
    for (int round = 0; round < 10; ++round) {
      const auto bootstrap = make_shared_memory_bootstrap(name, rank, 3, patience());
      const auto all = all_gather_values(*bootstrap, round * 10 + rank);
      require(all == std::vector{round * 10, round * 10 + 1, round * 10 + 2}, "met another generation of the group");
    }
  }));
}

TEST(SharedMemoryBootstrap, ThreadsMayMeetThere) {
  const std::string name = unique_name("threads");
  expect_nothing_thrown(
      run_threads(3, [&](int rank) { exercise(*make_shared_memory_bootstrap(name, rank, 3, patience())); }));
}

TEST(SharedMemoryBootstrap, LeftoverOfADeadProgramDoesNotDisturb) {
  const std::string name = unique_name("stale");
  // A rank 0 that dies while it waits for rank 1.
  const pid_t child = test::fork_child();
  if (child == 0) {
    try {
      make_shared_memory_bootstrap(name, 0, 2, 60);
    } catch (...) {
    }
    ::_exit(0);
  }
  const auto begin = steady_clock::now();
  while (!name_exists(name) && seconds_since(begin) < 10) ::usleep(1000);
  ASSERT_TRUE(name_exists(name));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ASSERT_TRUE(name_exists(name));
  expect_nothing_thrown(run_processes(3, [&](int rank) {
    if (rank == 0) ::usleep(50000);  // so that the others are likely to find the leftover first; right in any order
    exercise(*make_shared_memory_bootstrap(name, rank, 3, patience()));
  }));
  EXPECT_FALSE(name_exists(name));
}

/// Whether rank 0 has made the group known, so that others may join.
bool can_be_joined(const std::string& name) {
  const int fd = ::shm_open(path_of(name).c_str(), O_RDONLY, 0);
  std::uint32_t ready = 0;
  const bool there = fd >= 0 && ::pread(fd, &ready, sizeof ready, 0) == sizeof ready && ready != 0;
  if (fd >= 0) ::close(fd);
  return there;
}

/// The name goes when rank 0 sees that a rank has given up. Before that it is no name for the next group's ranks.
TEST(SharedMemoryBootstrap, AGroupThatIsOverIsNotJoined) {
  const std::string name = unique_name("over");
  const pid_t child = test::fork_child();
  if (child == 0) {
    try {
      make_shared_memory_bootstrap(name, 0, 3, 60);
    } catch (...) {
    }
    ::_exit(0);
  }
  const auto begin = steady_clock::now();
  while (!can_be_joined(name) && seconds_since(begin) < patience()) ::usleep(1000);
  ASSERT_TRUE(can_be_joined(name));
  ::kill(child, SIGSTOP);
  ::waitpid(child, nullptr, WUNTRACED);
  const auto refusal = [&](int rank) {
    try {
      make_shared_memory_bootstrap(name, rank, 3, 0.05);
    } catch (const TimeoutError& error) {
      return std::string(error.what());
    }
    return std::string("joined");
  };
  const std::string gave_up = refusal(1), next = refusal(2);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::shm_unlink(path_of(name).c_str());
  EXPECT_NE(gave_up.find("to join"), std::string::npos) << gave_up;
  EXPECT_NE(next.find("for rank 0 to create"), std::string::npos) << next;
}

TEST(SharedMemoryBootstrap, DeadlineWhileJoining) {
  const std::string name = unique_name("join");
  const auto errors = run_processes(3, [&](int rank) {
    // The first to give up has seen the other, which has come within the deadline.
    if (rank != 2) make_shared_memory_bootstrap(name, rank, 3, scaled(1));
  });
  // Whoever gives up first names the missing rank; the other may only learn that the group is over.
  EXPECT_NE((errors[0] + errors[1]).find("rank 2 to join"), std::string::npos) << errors[0] << '\n' << errors[1];
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[1].empty());
  EXPECT_FALSE(name_exists(name));
  EXPECT_THROW(make_shared_memory_bootstrap(name, 1, 2, 0.05), TimeoutError);
}

TEST(SharedMemoryBootstrap, DeadlineInAllGatherIsToldToLateRanksAtOnce) {
  const std::string name = unique_name("late");
  const double deadline = scaled(1);  // the ranks join within it
  int gave_up[2];                     // a byte from each rank that has
  ASSERT_EQ(::pipe(gave_up), 0);
  const auto errors = run_processes(3, [&](int rank) {
    const auto bootstrap = make_shared_memory_bootstrap(name, rank, 3, deadline);
    bootstrap->barrier();
    for (int others = 2; rank == 1 && others > 0; --others) {
      pollfd ready{.fd = gave_up[0], .events = POLLIN, .revents = 0};
      char byte = 0;
      require(::poll(&ready, 1, static_cast<int>(patience() * 1000)) == 1 && ::read(gave_up[0], &byte, 1) == 1,
              "the others did not give up");
    }
    const auto begin = steady_clock::now();
    try {
      bootstrap->barrier();
    } catch (const TimeoutError& error) {
      require(rank != 1 || seconds_since(begin) < 0.5 * deadline, "the late rank waited");
      require(rank == 1 || ::write(gave_up[1], "", 1) == 1, "nothing could be written to the pipe");
      throw;
    }
  });
  ::close(gave_up[0]);
  ::close(gave_up[1]);
  const bool named = errors[0].find("for rank 1 to enter") != std::string::npos ||
                     errors[2].find("for rank 1 to enter") != std::string::npos;
  EXPECT_TRUE(named) << errors[0] << "\n" << errors[2];
  EXPECT_NE(errors[1].find("gave up waiting"), std::string::npos) << errors[1];
}

TEST(SharedMemoryBootstrap, UnequalSizesAreToldToEveryRank) {
  const std::string name = unique_name("unequal");
  expect_nothing_thrown(run_processes(3, [&](int rank) {
    const auto bootstrap = make_shared_memory_bootstrap(name, rank, 3, patience());
    try {
      bootstrap->all_gather(pattern(rank, 0, rank == 1 ? 40000 : 16));
    } catch (const RankMismatch&) {
      exercise(*bootstrap);
      return;
    }
    throw std::runtime_error("unequal sizes went through");
  }));
}

TEST(SharedMemoryBootstrap, GroupsOfDifferentSizeAreRefused) {
  const std::string name = unique_name("sizes");
  const auto errors =
      run_processes(2, [&](int rank) { make_shared_memory_bootstrap(name, rank, rank + 2, scaled(1)); });
  EXPECT_NE(errors[1].find("rank 1 was told of 3 ranks, rank 0 of 2"), std::string::npos) << errors[1];
  EXPECT_NE(errors[0].find("rank 1 to join"), std::string::npos) << errors[0];
}

TEST(SharedMemoryBootstrap, ARankJoinsOnce) {
  const std::string name = unique_name("twice");
  std::atomic<int> refused = 0;
  // Whoever is refused comes as the rank that is missing, so nobody waits for a deadline.
  expect_nothing_thrown(run_threads(3, [&](int thread) {
    try {
      make_shared_memory_bootstrap(name, std::min(thread, 1), 3, patience());
    } catch (const Error& error) {
      require(std::strstr(error.what(), "rank 1 joined twice") != nullptr, error.what());
      ++refused;
      make_shared_memory_bootstrap(name, 2, 3, patience());
    }
  }));
  EXPECT_EQ(refused, 1);
}

// In /dev/shm any user may take any name, and no other one may remove it. Waiting for it to go used to take for ever.
TEST(SharedMemoryBootstrap, AnObjectOfAnotherUserIsRefusedAtOnce) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file to another user";
  const std::string name = unique_name("stranger");
  const int fd = ::shm_open(path_of(name).c_str(), O_RDWR | O_CREAT | O_EXCL, 0666);
  ASSERT_GE(fd, 0);
  const uid_t nobody = 65534;
  ASSERT_EQ(::fchown(fd, nobody, nobody), 0);
  for (const int rank : {0, 1}) {
    try {
      make_shared_memory_bootstrap(name, rank, 2, 0.2);
      ADD_FAILURE() << "rank " << rank << " used it";
    } catch (const SystemError& error) {
      EXPECT_NE(std::strstr(error.what(), "belongs to user 65534"), nullptr) << error.what();
    } catch (const TimeoutError& error) {
      ADD_FAILURE() << "rank " << rank << " waited: " << error.what();
    }
  }
  ::shm_unlink(path_of(name).c_str());
  ::close(fd);
}

TEST(SharedMemoryBootstrap, RefusesBadArguments) {
  for (const char* name : {"", "a/b", "dot.dot", "sp ace"}) {
    EXPECT_THROW(make_shared_memory_bootstrap(name, 0, 1), InvalidArgument) << name;
  }
  EXPECT_THROW(make_shared_memory_bootstrap("x", 2, 2, patience()), InvalidArgument);
  EXPECT_THROW(make_shared_memory_bootstrap("x", -1, 2, patience()), InvalidArgument);
  EXPECT_THROW(make_shared_memory_bootstrap("x", 0, 0), InvalidArgument);
}

TEST(CallbackBootstrap, UsesTheUsersAllGather) {
  const auto transport = make_thread_bootstraps(3, patience());
  expect_nothing_thrown(run_threads(3, [&](int rank) {
    Bootstrap& below = *transport[static_cast<std::size_t>(rank)];
    const auto bootstrap =
        make_callback_bootstrap(rank, 3, [&](std::span<const std::byte> mine, std::span<std::byte> all) {
          const std::vector<std::byte> gathered = below.all_gather(mine);
          require(gathered.size() == all.size(), "place for another number of bytes");
          std::copy(gathered.begin(), gathered.end(), all.begin());
        });
    exercise(*bootstrap);
    try {
      bootstrap->all_gather(pattern(rank, 0, rank == 0 ? 3 : 5));
      throw std::runtime_error("unequal sizes went through");
    } catch (const RankMismatch&) {
    }
    exercise(*bootstrap);
  }));
}

TEST(CallbackBootstrap, UnequalSizesAreSeenBeforeAnythingElseIsGathered) {
  const auto bootstrap = make_callback_bootstrap(0, 2, [](std::span<const std::byte> mine, std::span<std::byte> all) {
    require(all.size() == 2 * sizeof(std::uint64_t), "only the sizes are gathered");
    std::copy(mine.begin(), mine.end(), all.begin());
    all[mine.size()] = std::byte{3};  // what rank 1 brings
  });
  EXPECT_THROW(bootstrap->all_gather(pattern(0, 0, 5)), RankMismatch);
}

TEST(CallbackBootstrap, ItsExceptionsReachTheCaller) {
  const auto bootstrap = make_callback_bootstrap(
      0, 2, [](std::span<const std::byte>, std::span<std::byte>) { throw std::domain_error("cable unplugged"); });
  EXPECT_THROW(bootstrap->barrier(), std::domain_error);
  EXPECT_THROW(make_callback_bootstrap(0, 1, nullptr), InvalidArgument);
}

TEST(Agreement, AFailureOfOneRankIsEverybodys) {
  const auto bootstraps = make_thread_bootstraps(3, patience());
  const auto errors = run_threads(3, [&](int rank) {
    agree(*bootstraps[static_cast<std::size_t>(rank)], "boiling water", [&] {
      if (rank == 1) throw OutOfMemory("no kettle");
    });
  });
  EXPECT_EQ(errors[1], "no kettle");
  EXPECT_EQ(errors[0], "boiling water failed on rank 1: no kettle");
  EXPECT_EQ(errors[2], errors[0]);
  expect_nothing_thrown(
      run_threads(3, [&](int rank) { agree(*bootstraps[static_cast<std::size_t>(rank)], "boiling water", [] {}); }));
}

}  // namespace
}  // namespace deep_ep
