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
constexpr std::size_t kMostUnsent = std::size_t{64} << 10;

const sockaddr* socket_address(const Address& address) { return reinterpret_cast<const sockaddr*>(&address.at); }

/// At the same place in both families.
in_port_t& port_of(sockaddr_storage& address) {
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  return reinterpret_cast<sockaddr_in&>(address).sin_port;
}

/// By which others may call; loopback only where there is nothing else.
std::vector<Address> own_addresses(const SocketChoice& choice) {
  std::vector<Address> found;
  for (const InterfaceAddress& one : interface_addresses()) {  // loopback comes last
    const bool link_local = one.address.ss_family == AF_INET6 &&
                            IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(one.address).sin6_addr);
    if (link_local || (one.loopback && !found.empty()) || found.size() == kMostAddresses) continue;
    if (choice.family != AF_UNSPEC && one.address.ss_family != choice.family) continue;
    if (!choice.interfaces || choice.interfaces->matches(one.interface)) found.push_back({one.size, one.address});
  }
  return found;
}

UniqueFd new_socket(int family) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket.get(), level, option, &value, sizeof value);
  };
  // A peer whose machine has lost its power is noticed some day. Sockets that a listener accepts have the same options.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  if (family == AF_UNIX) return socket;
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);   // s
  set(IPPROTO_TCP, TCP_KEEPINTVL, 10);  // s
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

UniqueFd try_to_listen(const Address& where) {
  UniqueFd socket = new_socket(where.at.ss_family);
  const int no = 0;
  if (where.at.ss_family == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  if (::bind(socket.get(), socket_address(where), where.size) == 0 && ::listen(socket.get(), kQueue) == 0)
    return socket;
  return {};
}

Address any_address(sa_family_t family) {
  Address any{.size = sizeof(sockaddr_in), .at = {}};
  if (family == AF_INET6) any.size = sizeof(sockaddr_in6);
  any.at.ss_family = family;
  return any;
}

/// Abstract: it has no file, and goes with the socket.
Address unix_name(const Token& process) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string text = fmt::format("deep_ep.control.{}", deep_ep::to_string(process));
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  Address address{.size = static_cast<std::uint32_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size()), .at = {}};
  std::memcpy(&address.at, &name, address.size);
  return address;
}

/// Connects without waiting: the outcome shows when the socket can be written to.
UniqueFd begin_to_connect(UniqueFd socket, const Address& to) {
  if (::connect(socket.get(), socket_address(to), to.size) == 0 || errno == EINPROGRESS) return socket;
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
      port_of(place.at) = htons(static_cast<std::uint16_t>(port));
      TcpListener listener{.socket = try_to_listen(place), .addresses = {}, .choice = choice};
      refusal = errno;
      if (!listener.socket) continue;
      std::ranges::copy(chosen ? std::vector{place} : own, listener.addresses.begin());
      sockaddr_storage bound{};
      socklen_t size = sizeof bound;
      ::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&bound), &size);
      for (Address& address : listener.addresses) port_of(address.at) = port_of(bound);
      return listener;
    }
  }
  port_of(places.front().at) = htons(ports.first);
  fail<SystemError>(
      "control connections: cannot listen at {}{}: {}. DEEP_EP_CONTROL_PORTS must have a free port for each process of "
      "this host",
      to_string(places.front()), ports.last > ports.first ? fmt::format(" to {}", ports.last) : std::string(),
      errno_text(refusal));
}

UniqueFd listen_by_unix(const Token& process) {
  if (UniqueFd socket = try_to_listen(unix_name(process))) return socket;
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
  UniqueFd socket = new_socket(address.at.ss_family);
  Address to = address;
  addrinfo info{};
  info.ai_family = to.at.ss_family;
  info.ai_addr = reinterpret_cast<sockaddr*>(&to.at);
  info.ai_addrlen = to.size;
  if (socket) leave_by_chosen_interface(socket.get(), info, choice);
  return begin_to_connect(std::move(socket), to);
}

UniqueFd call_by_unix(const Token& process) { return begin_to_connect(new_socket(AF_UNIX), unix_name(process)); }

void Connection::send(const void* bytes, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(bytes);
  if (size != 0 && unsent.size() + size <= kMostUnsent) unsent.insert(unsent.end(), begin, begin + size);
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

UniqueFd watch_process(int pid) {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  static_cast<void>(pid);
  return {};
#endif
}

}  // namespace deep_ep::control
