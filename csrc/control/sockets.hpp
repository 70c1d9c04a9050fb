// Connections of control threads, and the ports at which they listen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::control {

struct PortRange {
  std::uint16_t first = 0;  ///< 0: the system chooses
  std::uint16_t last = 0;
};
/// "40000" or "40000-40100". InvalidArgument says what is allowed.
PortRange parse_ports(std::string_view text);

/// On the interface of DEEP_EP_SOCKET_IFNAME, else the first that is up. SystemError names address and ports.
UniqueFd listen_by_tcp(const PortRange& ports, SocketAddress& address);

/// Values of fixed sizes, in both directions.
struct Connection {
  UniqueFd socket;
  std::vector<std::byte> received = {}, unsent = {};

  /// Sends what is left over, and this, as far as the system takes it. receive() finds out that the connection is gone.
  void send(const void* bytes = nullptr, std::size_t size = 0);
  /// Takes some of what has come. Not 0: the connection has ended, an errno.
  int receive();
  /// The next value; false: not all of it has come.
  template <class T>
  bool take(T& value) {
    if (received.size() < sizeof value) return false;
    std::memcpy(&value, received.data(), sizeof value);
    received.erase(received.begin(), received.begin() + sizeof value);
    return true;
  }
};

}  // namespace deep_ep::control
