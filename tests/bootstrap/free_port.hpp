// Ports for tests.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::test {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// A port that the system gives to no other program until this one ends: a socket stays bound to it. A listener that
/// sets SO_REUSEADDR can use it.
inline std::uint16_t free_port() {
  static std::deque<UniqueFd> sockets;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const UniqueFd& socket = sockets.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::runtime_error("no port is free");
  }
  return ntohs(address.sin_port);
}

}  // namespace deep_ep::test
