#include "csrc/control/sockets.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {
namespace {

constexpr int kQueue = 1024;  ///< callers that the system holds until they are taken

const sockaddr* socket_address(const Address& address) {
  return reinterpret_cast<const sockaddr*>(address.bytes.data());
}
int family_of(const Address& address) { return socket_address(address)->sa_family; }

Address make_address(const void* address, std::size_t size) {
  Address made{.size = static_cast<std::uint32_t>(size)};
  std::memcpy(made.bytes.data(), address, std::min(size, made.bytes.size()));
  return made;
}

void set_port(Address& address, std::uint16_t port) {
  // At the same place in both families.
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  const std::uint16_t in_order = htons(port);
  std::memcpy(address.bytes.data() + offsetof(sockaddr_in, sin_port), &in_order, sizeof in_order);
}

bool is_link_local(const InterfaceAddress& one) {
  if (one.address.ss_family != AF_INET6) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(one.address).sin6_addr);
}
bool is_loopback(const InterfaceAddress& one) {
  if (one.address.ss_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(one.address).sin6_addr);
  }
  return (ntohl(reinterpret_cast<const sockaddr_in&>(one.address).sin_addr.s_addr) >> 24) == 127;
}

/// By which others may call; loopback only where there is nothing else.
std::vector<Address> own_addresses(const SocketChoice& choice) {
  std::vector<Address> found;
  const std::vector<InterfaceAddress> all = interface_addresses();
  for (const bool loopback : {false, true}) {
    for (const InterfaceAddress& one : all) {
      if (is_loopback(one) != loopback || is_link_local(one) || found.size() == kMostAddresses) continue;
      if (choice.family != AF_UNSPEC && one.address.ss_family != choice.family) continue;
      if (choice.interfaces && !choice.interfaces->matches(one.interface)) continue;
      found.push_back(make_address(&one.address, one.size));
    }
    if (!found.empty()) break;
  }
  return found;
}

UniqueFd try_to_listen(Address where) {
  UniqueFd socket(::socket(family_of(where), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  const int no = 0;
  if (family_of(where) == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  if (::bind(socket.get(), socket_address(where), where.size) == 0 && ::listen(socket.get(), kQueue) == 0)
    return socket;
  return {};
}

Address any_address(int family) {
  if (family == AF_INET6) {
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    return make_address(&any, sizeof any);
  }
  sockaddr_in any{};
  any.sin_family = AF_INET;
  return make_address(&any, sizeof any);
}

std::uint16_t port_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

struct UnixName {
  sockaddr_un address{};
  socklen_t size = 0;
};
/// Abstract: it has no file, and goes with the socket.
UnixName unix_name(const Token& process) {
  UnixName name;
  name.address.sun_family = AF_UNIX;
  const std::string text = fmt::format("deep_ep.control.{}", deep_ep::to_string(process));
  std::memcpy(name.address.sun_path + 1, text.data(), text.size());
  name.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return name;
}

/// Connects without waiting: the outcome shows when the socket can be written to.
UniqueFd begin_to_connect(UniqueFd socket, const sockaddr* to, socklen_t size) {
  if (!socket) return socket;
  if (::connect(socket.get(), to, size) == 0 || errno == EINPROGRESS) return socket;
  const int error = errno;
  socket = {};
  errno = error;
  return socket;
}

}  // namespace

PortRange parse_ports(std::string_view text) {
  const auto number = [](std::string_view digits) {
    int port = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (error != std::errc() || end != digits.data() + digits.size() || port < 1 || port > 65535) {
      fail<InvalidArgument>("'{}' is no port; allowed: <port>, or <first>-<last>, each 1 to 65535", digits);
    }
    return static_cast<std::uint16_t>(port);
  };
  text = trim(text);
  const std::size_t dash = text.find('-');
  const PortRange ports{.first = number(text.substr(0, dash)),
                        .last = number(dash == std::string_view::npos ? text : text.substr(dash + 1))};
  if (ports.first > ports.last) {
    fail<InvalidArgument>("the range begins with {} and ends with {}; allowed: <first>-<last>, the smaller one first",
                          ports.first, ports.last);
  }
  return ports;
}

std::string to_string(const Address& address) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  std::array<char, 8> port{};
  if (::getnameinfo(socket_address(address), address.size, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "no address";
  }
  return fmt::format("{} port {}", host.data(), port.data());
}

TcpListener listen_by_tcp(const PortRange& ports) {
  const SocketChoice choice = read_socket_choice();
  std::vector<Address> own = own_addresses(choice);
  const bool chosen = choice.interfaces && !own.empty();
  if (own.empty()) own = own_addresses({});
  if (own.empty()) throw SystemError("control connections: no interface of this machine that is up has an address");
  std::vector<Address> places = own;
  if (!chosen) places = {any_address(AF_INET6), any_address(AF_INET)};
  int refusal = EADDRNOTAVAIL;
  for (Address& place : places) {
    for (unsigned port = ports.first; port <= ports.last; ++port) {
      set_port(place, static_cast<std::uint16_t>(port));
      TcpListener listener{.socket = try_to_listen(place), .addresses = {}, .choice = choice};
      refusal = errno;
      if (!listener.socket) continue;
      if (chosen) {
        listener.addresses.front() = place;
      } else {
        std::ranges::copy(own, listener.addresses.begin());
      }
      for (Address& address : listener.addresses) {
        if (address.size != 0) set_port(address, port_of(listener.socket.get()));
      }
      return listener;
    }
  }
  set_port(places.front(), ports.first);
  fail<SystemError>(
      "control connections: cannot listen at {}{}: {}. DEEP_EP_CONTROL_PORTS must have a free port for each process of "
      "this host",
      to_string(places.front()), ports.last > ports.first ? fmt::format(" to {}", ports.last) : std::string(),
      errno_text(refusal));
}

UniqueFd listen_by_unix(const Token& process) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const UnixName name = unix_name(process);
  if (socket && ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name.address), name.size) == 0 &&
      ::listen(socket.get(), kQueue) == 0) {
    return socket;
  }
  fail<SystemError>("control connections: cannot listen on a Unix socket: {}", errno_text(errno));
}

bool is_of_this_user(int unix_socket) {
  constexpr uid_t kOfAnotherNamespace = 65534;
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == kOfAnotherNamespace;
}

UniqueFd call_by_tcp(const Address& address, const SocketChoice& choice) {
  UniqueFd socket(::socket(family_of(address), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Address to = address;
  addrinfo info{};
  info.ai_family = family_of(address);
  info.ai_addr = reinterpret_cast<sockaddr*>(to.bytes.data());
  info.ai_addrlen = to.size;
  if (socket) leave_by_chosen_interface(socket.get(), info, choice);
  return begin_to_connect(std::move(socket), socket_address(address), address.size);
}

UniqueFd call_by_unix(const Token& process) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const UnixName name = unix_name(process);
  return begin_to_connect(std::move(socket), reinterpret_cast<const sockaddr*>(&name.address), name.size);
}

void keep_alive(int tcp_socket) {
  const int on = 1;
  const int idle_s = 30;
  const int between_s = 10;
  const int probes = 6;
  ::setsockopt(tcp_socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(tcp_socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(tcp_socket, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
  ::setsockopt(tcp_socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(tcp_socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

UniqueFd watch_process(int pid) {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  static_cast<void>(pid);
  return {};
#endif
}

}  // namespace deep_ep::control
