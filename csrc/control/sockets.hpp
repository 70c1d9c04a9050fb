// The sockets by which a control thread listens and calls: abstract Unix sockets within a network namespace, TCP
// elsewhere.
#pragma once

#include <netinet/in.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::control {

struct PortRange {
  std::uint16_t first = 0;  ///< 0: the system chooses
  std::uint16_t last = 0;
};
/// "40000" or "40000-40100". InvalidArgument says what is wrong.
PortRange parse_ports(std::string_view text);

/// Plain data, which travels.
struct Address {
  std::uint32_t size = 0;  ///< 0: there is none
  sockaddr_storage at{};
};
/// "10.0.0.7 port 40001"
std::string to_string(const Address& address);

inline constexpr std::size_t kMostAddresses = 4;
using Addresses = std::array<Address, kMostAddresses>;

struct TcpListener {
  UniqueFd socket;
  Addresses addresses;  ///< by which others may reach it, best first
  SocketChoice choice;  ///< as it was read then: also for calls
};
/// On the interface of DEEP_EP_SOCKET_IFNAME, else on all. SystemError names addresses and ports.
TcpListener listen_by_tcp(const PortRange& ports);

/// On the name that belongs to `process`.
UniqueFd listen_by_unix(const Token& process);

/// May the other end of a Unix connection be one of this user's? (The kernel hides users of other namespaces.)
bool is_of_this_user(int unix_socket);

/// A socket that connects, or has connected; without one `errno` says why.
UniqueFd call_by_tcp(const Address& address, const SocketChoice& choice = {});
UniqueFd call_by_unix(const Token& process);

/// Values of fixed sizes, in both directions. Nothing here waits.
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

/// A descriptor that can be read when the process has ended. None where the system has no such thing.
UniqueFd watch_process(int pid);

}  // namespace deep_ep::control
