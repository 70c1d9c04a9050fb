// Sockets of the library's own connections, which do not wait: abstract Unix sockets within a network namespace, TCP
// elsewhere.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

/// Messages whose sizes the receiver knows, in both directions.
struct Connection {
  UniqueFd socket;
  std::vector<std::byte> received = {}, unsent = {};

  /// Sends what is left over, and this, as far as the system takes it. receive() finds out that the connection is gone.
  void send(const void* bytes = nullptr, std::size_t size = 0);
  /// Takes some of what has come. Not 0: the connection has ended, an errno.
  int receive();
  /// The next bytes; false: not all of them have come.
  bool take_bytes(std::span<std::byte> bytes);
  template <class T>
  bool take(T& value) {
    return take_bytes(std::as_writable_bytes(std::span(&value, 1)));
  }
};

}  // namespace deep_ep
