#include "csrc/bootstrap/socket.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"
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

/// One that nobody listens on.
std::uint16_t free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  return ntohs(address.sin_port);
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

TEST(SocketBootstrap, AStrangerIsRefused) {
  const std::uint16_t port = free_port();
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 0) {
      make_socket_bootstrap(0, 2, "", port, long_patience());
      return;
    }
    const sockaddr_in address = loopback(port);
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
    while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      std::this_thread::yield();
      socket = UniqueFd(::socket(AF_INET, SOCK_STREAM, 0));
    }
    const std::string words = "GET / HTTP/1.1\r\n\r\n";
    ::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL);
    char byte = 0;
    ::recv(socket.get(), &byte, 1, 0);  // until it is closed
  });
  EXPECT_NE(errors[0].find("is no rank of this group"), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace deep_ep::test
