#include "tools/common/calling.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <thread>

#include "csrc/bootstrap/socket.hpp"
#include "csrc/support/deadline.hpp"

namespace deep_ep::tools {

AddressList find_addresses(const std::string& host, const std::string& port, int family, int& error) {
  addrinfo hints{};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = host.empty() ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &found);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

std::shared_ptr<Lookup> look_up(const std::string& host, const std::string& port, int family,
                                const std::function<bool()>& go_on) {
  auto lookup = std::make_shared<Lookup>();
  std::thread([lookup, host, port, family] {
    lookup->addresses = find_addresses(host, port, family, lookup->error);
    lookup->over = true;
  }).detach();
  while (!lookup->over) {
    if (!go_on()) return nullptr;
    ::poll(nullptr, 0, 5);
  }
  return lookup;
}

UniqueFd connect_to(const addrinfo& address, const SocketChoice& choice, double seconds,
                    const std::function<bool()>& go_on, int& error) {
  UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  leave_by_chosen_interface(socket.get(), address, choice);
  error = ::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    const Deadline patience(seconds);
    pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
    while (::poll(&ready, 1, 50) <= 0 && go_on() && !patience.expired()) {
    }
    socklen_t length = sizeof error;
    error = ETIMEDOUT;
    if (ready.revents != 0) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0 && has_called_itself(socket.get())) {
    // Closed without a trace, which would keep the port from whoever shall listen there.
    const linger none{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    error = ECONNREFUSED;
  }
  if (error == 0) return socket;
  return {};
}

}  // namespace deep_ep::tools
