// Sockets that neither wait nor know what they carry: abstract Unix sockets within a network namespace, TCP elsewhere.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::control {

struct PortRange {
  std::uint16_t first = 0;  ///< 0: the system chooses
  std::uint16_t last = 0;
};
/// "40000" or "40000-40100". InvalidArgument says what is allowed.
PortRange parse_ports(std::string_view text);

/// Plain data, which travels.
struct Address {
  std::uint32_t size = 0;  ///< 0: there is none
  sockaddr_storage at{};

  bool is_unix() const { return at.ss_family == AF_UNIX; }
};
/// "10.0.0.7 port 40001", or "a Unix socket"
std::string to_string(const Address& address);
/// The name that belongs to a process.
Address unix_address(const Token& process);

struct TcpListener {
  UniqueFd socket;
  Address address;
};
/// On the interface of DEEP_EP_SOCKET_IFNAME, else the first that is up. SystemError names address and ports.
TcpListener listen_by_tcp(const PortRange& ports);
/// Without a socket `errno` says why.
UniqueFd listen_at(const Address& address);

/// May the other end of a Unix connection be one of this user's? (The kernel hides users of other namespaces.)
bool is_of_this_user(int unix_socket);

/// A socket that connects, or has connected; without one `errno` says why.
UniqueFd call(const Address& address);

/// Values of fixed sizes, in both directions.
struct Connection {
  UniqueFd socket;
  std::vector<std::byte> received = {}, unsent = {};

  /// Sends what is left over, and this, as far as the system takes it. receive() finds out that the connection is gone.
  void send(const void* bytes = nullptr, std::size_t size = 0);
  /// Takes some of what has come. Not 0: the connection has ended, an errno.
  int receive();
  /// The next value, which stays; false: not all of it has come.
  template <class T>
  bool peek(T& value) const {
    if (received.size() < sizeof value) return false;
    std::memcpy(&value, received.data(), sizeof value);
    return true;
  }
  template <class T>
  bool take(T& value) {
    if (!peek(value)) return false;
    received.erase(received.begin(), received.begin() + sizeof value);
    return true;
  }
};

}  // namespace deep_ep::control
