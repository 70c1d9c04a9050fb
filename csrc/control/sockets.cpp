#include "csrc/control/sockets.hpp"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::control {

PortRange parse_ports(std::string_view text) {
  const std::vector<std::string_view> ends = split(text, '-');
  const auto port = [](std::string_view digits) { return parse_number<std::uint16_t>(digits).value_or(0); };
  const PortRange ports{.first = port(ends.front()), .last = port(ends.back())};
  if (ends.size() > 2 || ports.first == 0 || ports.last < ports.first) {
    throw InvalidArgument("allowed: <port>, or <first>-<last>, each 1 to 65535, the smaller one first");
  }
  return ports;
}

UniqueFd listen_by_tcp(const PortRange& ports, SocketAddress& address) {
  address = own_address(read_socket_choice());
  if (address.size == 0) address = own_address({});
  if (address.size == 0)
    throw SystemError("control connections: no interface of this machine that is up has an address");
  int refusal = 0;
  for (unsigned port = ports.first; port <= ports.last; ++port) {
    // At the same place in both families.
    reinterpret_cast<sockaddr_in&>(address.at).sin_port = htons(static_cast<std::uint16_t>(port));
    UniqueFd socket = listen_at(address);
    refusal = errno;
    socklen_t size = sizeof address.at;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.at), &size);
    if (socket) return socket;
  }
  fail<SystemError>(
      "control connections: cannot listen at {}, the last of ports {} to {}: {}. DEEP_EP_CONTROL_PORTS must have a "
      "free port for each process of this host",
      to_string(address), ports.first, ports.last, errno_text(refusal));
}

}  // namespace deep_ep::control
