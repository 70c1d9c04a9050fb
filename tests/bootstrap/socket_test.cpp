#include "csrc/bootstrap/socket.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/log.hpp"
#include "deep_ep/version.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// One that nobody listens on, and that no outgoing call of this machine gets: those are from 32768 on.
std::uint16_t free_port() {
  static std::atomic<int> next = 0;
  for (;;) {
    const auto port = static_cast<std::uint16_t>(10000 + (static_cast<int>(::getpid()) * 37 + 7 * next++) % 20000);
    const UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = loopback(port);
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return port;
  }
}

TEST(SocketBootstrap, GathersInRankOrder) {
  const std::uint16_t port = free_port();
  expect_nothing_thrown(run_threads(4, [&](int rank) {
    const auto bootstrap = make_socket_bootstrap(rank, 4, "localhost", port, long_patience());
    for (int round = 0; round < 20; ++round) {
      std::vector<int> expected(4);
      std::iota(expected.begin(), expected.end(), round);
      if (all_gather_values(*bootstrap, round + rank) != expected) throw std::runtime_error("wrong values");
    }
    // More than a socket holds.
    const std::vector<std::byte> large(std::size_t{2} << 20, static_cast<std::byte>(rank));
    const std::vector<std::byte> all = bootstrap->all_gather(large);
    for (std::size_t i = 0; i < all.size(); i += 4096) {
      if (all[i] != static_cast<std::byte>(i / large.size())) throw std::runtime_error("wrong bytes");
    }
  }));
}

/// With a single port to call from, a call to it that nobody takes meets itself.
TEST(SocketBootstrap, ACallDoesNotMeetItself) {
  const std::uint16_t port = free_port();
  const sockaddr_in address = loopback(port);
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_TRUE(has_called_itself(socket.get()));
}

TEST(SocketBootstrap, NobodyComes) {
  EXPECT_THROW(make_socket_bootstrap(0, 2, "", free_port(), 0.2), TimeoutError);
  EXPECT_THROW(make_socket_bootstrap(1, 2, "127.0.0.1", free_port(), 0.2), TimeoutError);
  EXPECT_THROW(make_socket_bootstrap(1, 2, "no such host", 1, 0.2), SystemError);
}

TEST(SocketBootstrap, ARankThatGoesAwayIsNoticed) {
  const std::uint16_t port = free_port();
  const auto errors = run_threads(2, [&](int rank) {
    const auto bootstrap = make_socket_bootstrap(rank, 2, "127.0.0.1", port, long_patience());
    if (rank == 1) return;
    bootstrap->barrier();
  });
  EXPECT_NE(errors[0].find("bootstrap over TCP: a rank went away"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "");
}

/// Calls rank 0 as soon as it listens, and says `words`.
UniqueFd call_and_say(std::uint16_t port, const std::string& words) {
  const sockaddr_in address = loopback(port);
  const Deadline deadline(patience());
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (deadline.expired()) throw std::runtime_error("nobody listens");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    socket = UniqueFd(::socket(AF_INET, SOCK_STREAM, 0));
  }
  ::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL);
  return socket;
}

/// What a rank says first.
struct Words {
  std::uint64_t magic = 0x64656570'65702032;
  std::int32_t rank = 1;
  std::int32_t size = 2;
  char version[32] = DEEP_EP_VERSION;
};

TEST(SocketBootstrap, StrangersAreRefusedAndHoldNobodyUp) {
  const Words other_words{.magic = 1};
  const std::uint16_t port = free_port();
  std::mutex mutex;
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    said.emplace_back(line);
  });
  expect_nothing_thrown(run_threads(2, [&](int rank) {
    std::vector<UniqueFd> strangers;
    if (rank == 1) {  // in front of this rank: two that talk, one of them nearly like a rank, and one that does not
      strangers.push_back(call_and_say(port, "GET / HTTP/1.1\r\n" + std::string(100, ' ')));
      strangers.push_back(call_and_say(port, {reinterpret_cast<const char*>(&other_words), sizeof other_words}));
      strangers.push_back(call_and_say(port, ""));
    }
    make_socket_bootstrap(rank, 2, "127.0.0.1", port, long_patience())->barrier();
  }));
  set_log_sink({});
  ASSERT_EQ(said.size(), 3u);
  for (const std::size_t i : {0u, 1u}) {
    EXPECT_NE(said[i].find("is no rank of this group; waiting for another caller"), std::string::npos) << said[i];
  }
  EXPECT_NE(said[2].find("waited 2 s for a rank's word"), std::string::npos) << said[2];
}

TEST(SocketBootstrap, AnotherVersionIsNamed) {
  const Words hello{.version = "0.0.7"};
  const std::uint16_t port = free_port();
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 0) {
      make_socket_bootstrap(0, 2, "", port, long_patience());
      return;
    }
    const UniqueFd socket = call_and_say(port, {reinterpret_cast<const char*>(&hello), sizeof hello});
    Words answer;
    ::recv(socket.get(), &answer, sizeof answer, MSG_WAITALL);
    if (std::string(answer.version) != DEEP_EP_VERSION) throw std::runtime_error("rank 0 did not tell its version");
  });
  EXPECT_EQ(errors[0], "bootstrap over TCP: rank 0 runs deep_ep " DEEP_EP_VERSION ", rank 1 runs 0.0.7");
  EXPECT_EQ(errors[1], "");
}

TEST(SocketBootstrap, AfterATimeoutTheFirstFailureIsRepeated) {
  const std::uint16_t port = free_port();
  std::latch late{1};
  const auto errors = run_threads(2, [&](int rank) {
    const auto bootstrap = make_socket_bootstrap(rank, 2, "127.0.0.1", port, short_deadline());
    if (rank == 1) {
      late.wait();
      bootstrap->barrier();  // its word comes now, but for a call that is over
      return;
    }
    EXPECT_THROW(bootstrap->barrier(), TimeoutError);
    late.count_down();
    bootstrap->barrier();
  });
  EXPECT_NE(errors[0].find("s for a rank's word"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1], "");
}

TEST(SocketBootstrap, APeerThatSaysAByteNowAndThenIsLateToo) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 20;
  const std::uint16_t port = free_port();
  std::atomic<bool> over{false};
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 0) {
      const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { over = true; });  // however it ends
      const auto bootstrap = make_socket_bootstrap(0, 2, "", port, short_deadline());
      EXPECT_THROW(bootstrap->all_gather(std::vector<std::byte>(kBytes)), TimeoutError);
      return;
    }
    const Words hello;
    const UniqueFd socket = call_and_say(port, {reinterpret_cast<const char*>(&hello), sizeof hello});
    ::send(socket.get(), &kBytes, sizeof kBytes, MSG_NOSIGNAL);
    const Deadline deadline(long_patience());
    while (!over && !deadline.expired()) {
      ::send(socket.get(), "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  EXPECT_EQ(errors[0], "");
}

TEST(SocketBootstrap, WhoMayNotTakeACallSaysSo) {
  const std::uint16_t port = free_port();
  const sockaddr_in address = loopback(port);
  const UniqueFd caller(::socket(AF_INET, SOCK_STREAM, 0));
  const int next = UniqueFd(::dup(caller.get())).get();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit scarce{static_cast<rlim_t>(next) + 1, before.rlim_max};  // one more file: who listens
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &scarce), 0);
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 0) make_socket_bootstrap(0, 2, "", port, long_patience());
    const Deadline deadline(long_patience());
    while (rank == 1 && !deadline.expired() &&
           ::connect(caller.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      std::this_thread::yield();
    }
  });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(errors[0].find("cannot take a call on port"), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace deep_ep::test
