// Which network interface and which kind of address the library's own TCP connections take: DEEP_EP_SOCKET_IFNAME,
// DEEP_EP_SOCKET_FAMILY and those of other libraries that stand for them.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "csrc/support/device_list.hpp"
#include "csrc/support/environment.hpp"

namespace deep_ep {

/// An address of this machine.
struct InterfaceAddress {
  std::string interface;
  sockaddr_storage address{};
  socklen_t size = 0;
  bool loopback = false;
};
/// Of all interfaces that are up, in the order of the system; loopback last.
std::vector<InterfaceAddress> interface_addresses();

struct SocketChoice {
  DeviceFilter interfaces;
  int family = AF_UNSPEC;
};
/// Of DEEP_EP_SOCKET_IFNAME: names are beginnings of names unless = stands in front, in Gloo's variable whole ones.
DeviceFilter parse_interfaces(const environment::Value& value);
/// InvalidArgument where an own variable is wrong.
SocketChoice read_socket_choice(const environment::Source& source = environment::of_process);

}  // namespace deep_ep
