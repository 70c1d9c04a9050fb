// Which network interface and which kind of address the library's own TCP connections take: DEEP_EP_SOCKET_IFNAME,
// DEEP_EP_SOCKET_FAMILY and those of other libraries that stand for them.
#pragma once

#include <ifaddrs.h>
#include <sys/socket.h>

#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/device_list.hpp"
#include "csrc/support/environment.hpp"

namespace deep_ep {

struct SocketChoice {
  DeviceFilter interfaces;
  int family = AF_UNSPEC;
};
/// Of DEEP_EP_SOCKET_IFNAME: names are beginnings of names unless = stands in front, in Gloo's variable whole ones.
DeviceFilter parse_interfaces(const environment::Value& value);
/// InvalidArgument where an own variable is wrong.
SocketChoice read_socket_choice(const environment::Source& source = environment::of_process);

/// By which other hosts may call: of the first interface that is up and allowed. Those without a carrier, and the
/// bridges of Docker, which have one address on many hosts, come after all others, and loopback comes last; size 0:
/// there is none at all. `list`: null, or interfaces that getifaddrs() would give.
SocketAddress own_address(const SocketChoice& choice, const ifaddrs* list = nullptr);

}  // namespace deep_ep
