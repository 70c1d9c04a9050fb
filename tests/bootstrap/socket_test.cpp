#include "tools/common/socket_bootstrap.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/support/deadline.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/log.hpp"
#include "deep_ep/version.hpp"
#include "tests/bootstrap/free_port.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

TEST(SocketBootstrap, GathersMoreThanASocketHolds) {
  const std::uint16_t port = free_port();
  expect_nothing_thrown(run_threads(4, [&](int rank) {
    const auto bootstrap = make_socket_bootstrap(rank, 4, "localhost", port, long_patience());
    const std::vector<std::byte> large(std::size_t{2} << 20, static_cast<std::byte>(rank));
    const std::vector<std::byte> all = bootstrap->all_gather(large);
    for (std::size_t i = 0; i < all.size(); i += 4096) {
      if (all[i] != static_cast<std::byte>(i / large.size())) throw std::runtime_error("wrong bytes");
    }
  }));
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

TEST(SocketBootstrap, ARankThatStaysAwayIsNamed) {
  const std::uint16_t port = free_port();
  std::shared_ptr<Bootstrap> stays;
  const auto errors = run_threads(2, [&](int rank) {
    const auto bootstrap = make_socket_bootstrap(rank, 2, "127.0.0.1", port, short_deadline());
    if (rank == 1) stays = bootstrap;
    if (rank == 0) bootstrap->barrier();
  });
  EXPECT_NE(errors[0].find("bootstrap over TCP: rank 0 of 2 waited"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find(" s for rank 1"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "");
}

/// A call to a port from which it comes itself hears its own words. The rank calls again.
TEST(SocketBootstrap, ACallThatMeetsItselfIsNoAnswer) {
  const std::uint16_t port = free_port();
  const sockaddr_in address = loopback(port);
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  const int yes = 1;
  ASSERT_EQ(::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(listener.get(), 8), 0);
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 1) make_socket_bootstrap(1, 2, "127.0.0.1", port, scaled(1));
    if (rank == 1) return;
    const UniqueFd caller(::accept(listener.get(), nullptr, nullptr));
    std::string words(200, '\0');
    const ssize_t count = ::recv(caller.get(), words.data(), words.size(), 0);
    ::send(caller.get(), words.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL);
  });
  EXPECT_NE(errors[1].find("for a rank's word"), std::string::npos) << errors[1];
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
  std::uint64_t magic = 0x64656570'65702033;
  std::int32_t rank = 1;
  std::int32_t size = 2;
  char version[32] = DEEP_EP_VERSION;
  Token job = job_token();
};

std::string bytes_of(const Words& words) { return {reinterpret_cast<const char*>(&words), sizeof words}; }

/// What is logged meanwhile.
class LogLines {
 public:
  LogLines() {
    set_log_sink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { set_log_sink({}); }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

/// Rank 1 of two calls behind such strangers, whose sockets live as long as the ranks meet. @return what is logged.
std::vector<std::string> meet_behind(const std::vector<std::string>& strangers) {
  const std::uint16_t port = free_port();
  LogLines log;
  expect_nothing_thrown(run_threads(2, [&](int rank) {
    std::vector<UniqueFd> sockets;
    if (rank == 1) {
      for (const std::string& words : strangers) sockets.push_back(call_and_say(port, words));
    }
    make_socket_bootstrap(rank, 2, "127.0.0.1", port, long_patience())->barrier();
  }));
  return log.take();
}

TEST(SocketBootstrap, StrangersAreRefused) {
  const auto said = meet_behind({"GET / HTTP/1.1\r\n" + std::string(100, ' '), bytes_of({.magic = 1})});
  ASSERT_EQ(said.size(), 2u);
  for (const std::string& line : said) {
    EXPECT_NE(line.find("is no rank of this group; waiting for another caller"), std::string::npos) << line;
  }
}

/// On the port of a job that is over, or that another one chose, too.
TEST(SocketBootstrap, ARankOfAnotherJobTakesNoSeat) {
  const auto said = meet_behind({bytes_of({.job = token_of("another job")}), bytes_of({.size = 3}),
                                 bytes_of({.version = "0.0.7", .job = token_of("another job")})});
  ASSERT_EQ(said.size(), 3u);
  EXPECT_NE(said[0].find("is no rank of this group, but of another job"), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("is no rank of this group, but of a group of 3, not of 2"), std::string::npos) << said[1];
  EXPECT_NE(said[2].find("is no rank of this group, and runs deep_ep 0.0.7, not " DEEP_EP_VERSION), std::string::npos)
      << said[2];
}

/// Those that say nothing do not keep out a rank that calls behind many of them.
TEST(SocketBootstrap, SilentCallersAreNotWaitedFor) { EXPECT_TRUE(meet_behind(std::vector<std::string>(70)).empty()); }

TEST(SocketBootstrap, ACallToAnotherJobIsRefused) {
  const std::uint16_t port = free_port();
  std::atomic<bool> refused = false;
  LogLines log;
  const auto errors = run_threads(3, [&](int thread) {
    const Token job = token_of(thread == 2 ? "theirs" : "ours");
    if (thread == 1) {
      for (const Deadline deadline(long_patience()); !refused && !deadline.expired();) std::this_thread::yield();
    }
    const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { refused = refused || thread == 2; });
    make_socket_bootstrap(thread == 0 ? 0 : 1, 2, "127.0.0.1", port, long_patience(), job)->barrier();
  });
  EXPECT_EQ(errors[0] + errors[1], "");
  EXPECT_NE(errors[2].find("is not rank 0 of this group, but of another job"), std::string::npos) << errors[2];
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

}  // namespace
}  // namespace deep_ep::test
