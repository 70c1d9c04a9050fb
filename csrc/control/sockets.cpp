#include "csrc/control/sockets.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {
namespace {

constexpr int kQueue = 1024;  ///< callers that the system holds until they are taken

const sockaddr* socket_address(const Address& address) { return reinterpret_cast<const sockaddr*>(&address.at); }

/// At the same place in both families.
in_port_t& port_of(sockaddr_storage& address) {
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  return reinterpret_cast<sockaddr_in&>(address).sin_port;
}

/// By which others may call. Loopback comes last, for where there is nothing else; size 0: there is none at all.
Address own_address(const SocketChoice& choice) {
  for (const InterfaceAddress& one : interface_addresses()) {
    const bool link_local = one.address.ss_family == AF_INET6 &&
                            IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(one.address).sin6_addr);
    if (link_local || (choice.family != AF_UNSPEC && one.address.ss_family != choice.family)) continue;
    if (!choice.interfaces || choice.interfaces->matches(one.interface)) return {one.size, one.address};
  }
  return {};
}

UniqueFd new_socket(int family) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (family == AF_UNIX) return socket;
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket.get(), level, option, &value, sizeof value);
  };
  // A firewall may forget a connection that is idle. Sockets that a listener accepts have the same options.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);   // s
  set(IPPROTO_TCP, TCP_KEEPINTVL, 10);  // s
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

}  // namespace

PortRange parse_ports(std::string_view text) {
  const std::vector<std::string_view> ends = split(text, '-');
  const auto port = [](std::string_view digits) { return parse_number<std::uint16_t>(digits).value_or(0); };
  const PortRange ports{.first = port(ends.front()), .last = port(ends.back())};
  if (ends.size() > 2 || ports.first == 0 || ports.last < ports.first) {
    throw InvalidArgument("allowed: <port>, or <first>-<last>, each 1 to 65535, the smaller one first");
  }
  return ports;
}

std::string to_string(const Address& address) {
  if (address.is_unix()) return "a Unix socket";
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(socket_address(address), address.size, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "no address";
  }
  return fmt::format("{} port {}", host.data(), port.data());
}

Address unix_address(const Token& process) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string text = fmt::format("deep_ep.control.{}", deep_ep::to_string(process));
  std::memcpy(name.sun_path + 1, text.data(), text.size());  // abstract: it has no file, and goes with the socket
  Address address{.size = static_cast<std::uint32_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size()), .at = {}};
  std::memcpy(&address.at, &name, address.size);
  return address;
}

UniqueFd listen_at(const Address& address) {
  UniqueFd socket = new_socket(address.at.ss_family);
  const int yes = 1;  // connections of a process before may still hold the port
  if (!address.is_unix()) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const bool listens =
      ::bind(socket.get(), socket_address(address), address.size) == 0 && ::listen(socket.get(), kQueue) == 0;
  return listens ? std::move(socket) : UniqueFd();
}

TcpListener listen_by_tcp(const PortRange& ports) {
  TcpListener listener{.socket = {}, .address = own_address(read_socket_choice())};
  Address& address = listener.address;
  if (address.size == 0) address = own_address({});
  if (address.size == 0)
    throw SystemError("control connections: no interface of this machine that is up has an address");
  int refusal = 0;
  for (unsigned port = ports.first; port <= ports.last && !listener.socket; ++port) {
    port_of(address.at) = htons(static_cast<std::uint16_t>(port));
    listener.socket = listen_at(address);
    refusal = errno;
  }
  if (listener.socket) {
    socklen_t size = sizeof address.at;
    ::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&address.at), &size);
    return listener;
  }
  fail<SystemError>(
      "control connections: cannot listen at {}, the last of ports {} to {}: {}. DEEP_EP_CONTROL_PORTS must have a "
      "free port for each process of this host",
      to_string(address), ports.first, ports.last, errno_text(refusal));
}

bool is_of_this_user(int unix_socket) {
  constexpr uid_t kOfAnotherNamespace = 65534;
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == kOfAnotherNamespace;
}

UniqueFd call(const Address& address) {
  UniqueFd socket = new_socket(address.at.ss_family);
  if (::connect(socket.get(), socket_address(address), address.size) == 0 || errno == EINPROGRESS) return socket;
  const int error = errno;
  socket = {};
  errno = error;
  return socket;
}

void Connection::send(const void* bytes, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(bytes);
  unsent.insert(unsent.end(), begin, begin + size);
  const ssize_t sent = ::send(socket.get(), unsent.data(), unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) unsent.erase(unsent.begin(), unsent.begin() + sent);
}

int Connection::receive() {
  std::array<std::byte, 16384> bytes;
  const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got > 0) received.insert(received.end(), bytes.begin(), bytes.begin() + got);
  if (got == 0) return ECONNRESET;
  return got > 0 || errno == EAGAIN || errno == EINTR ? 0 : errno;
}

}  // namespace deep_ep::control
