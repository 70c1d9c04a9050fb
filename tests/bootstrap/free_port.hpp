// Ports for tests.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::test {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// One that nobody listens on, and that no outgoing call of this machine gets: those are from 32768 on.
inline std::uint16_t free_port() {
  static std::atomic<int> next = 0;
  for (;;) {
    const auto port = static_cast<std::uint16_t>(10000 + (static_cast<int>(::getpid()) * 37 + 7 * next++) % 20000);
    const UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = loopback(port);
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return port;
  }
}

}  // namespace deep_ep::test
