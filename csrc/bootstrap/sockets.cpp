#include "csrc/bootstrap/sockets.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

constexpr int kQueue = 1024;  ///< callers that the system holds until they are taken

UniqueFd new_socket(int family) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || family == AF_UNIX) return socket;
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket.get(), level, option, &value, sizeof value);
  };
  // A firewall may forget a connection that is idle. Sockets that a listener accepts have the same options.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);   // s
  set(IPPROTO_TCP, TCP_KEEPINTVL, 10);  // s
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(IPPROTO_IPV6, IPV6_V6ONLY, 0);  // whatever the system's default is
  return socket;
}

}  // namespace

std::string to_string(const SocketAddress& address) {
  if (address.is_unix()) return "a Unix socket";
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(address.get(), address.size, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "no address";
  }
  return fmt::format("{} port {}", host.data(), port.data());
}

SocketAddress unix_address(std::string_view name) {
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  std::ranges::copy(name, place.sun_path + 1);  // a zero byte first: abstract
  SocketAddress address{.size = static_cast<std::uint32_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size()),
                        .at = {}};
  std::memcpy(&address.at, &place, address.size);
  return address;
}

UniqueFd listen_at(const SocketAddress& address) {
  UniqueFd socket = new_socket(address.at.ss_family);
  const int yes = 1;  // connections of a process before may still hold the port
  if (socket && !address.is_unix()) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const bool listens =
      socket && ::bind(socket.get(), address.get(), address.size) == 0 && ::listen(socket.get(), kQueue) == 0;
  return listens ? std::move(socket) : UniqueFd();
}

UniqueFd call_at(const SocketAddress& address) {
  UniqueFd socket = new_socket(address.at.ss_family);
  const bool calls = socket && (::connect(socket.get(), address.get(), address.size) == 0 || errno == EINPROGRESS);
  return calls ? std::move(socket) : UniqueFd();
}

bool is_of_this_user(int unix_socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
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

bool Connection::take_bytes(std::span<std::byte> bytes) {
  if (received.size() < bytes.size()) return false;
  const auto end = received.begin() + static_cast<std::ptrdiff_t>(bytes.size());
  std::copy(received.begin(), end, bytes.begin());
  received.erase(received.begin(), end);
  return true;
}

}  // namespace deep_ep
