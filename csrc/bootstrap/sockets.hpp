// Sockets of the library's own connections, which do not wait: abstract Unix sockets within a network namespace, TCP
// elsewhere.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep {

/// Plain data, which travels.
struct SocketAddress {
  std::uint32_t size = 0;  ///< 0: there is none
  sockaddr_storage at{};

  bool is_unix() const { return at.ss_family == AF_UNIX; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
};
/// "10.0.0.7 port 40001", or "a Unix socket"
std::string to_string(const SocketAddress& address);
/// Abstract: it has no file, and goes with the socket.
SocketAddress unix_address(std::string_view name);

/// Without a socket `errno` says why.
UniqueFd listen_at(const SocketAddress& address);
/// A socket that connects, or has connected; without one `errno` says why.
UniqueFd call_at(const SocketAddress& address);
/// Is the process at the other end of a Unix connection one of this user's?
bool is_of_this_user(int unix_socket);

}  // namespace deep_ep
