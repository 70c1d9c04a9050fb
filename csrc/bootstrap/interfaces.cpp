#include "csrc/bootstrap/interfaces.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "csrc/support/logging.hpp"

namespace deep_ep {

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(list, &::freeifaddrs);
  std::vector<InterfaceAddress> found;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress address{.interface = one->ifa_name};
    address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.address, one->ifa_addr, address.size);
    address.loopback = (one->ifa_flags & IFF_LOOPBACK) != 0;
    found.push_back(std::move(address));
  }
  std::ranges::stable_partition(found, [](const InterfaceAddress& one) { return !one.loopback; });
  return found;
}

DeviceFilter parse_interfaces(const environment::Value& value) {
  return {value, /*prefixes=*/value.name != "GLOO_SOCKET_IFNAME", /*ports=*/false};
}

SocketChoice read_socket_choice(const environment::Source& source) {
  SocketChoice choice;
  environment::Reader reader(source);
  choice.interfaces = reader.read("DEEP_EP_SOCKET_IFNAME", parse_interfaces).value_or(DeviceFilter());
  const std::string family = reader.value("DEEP_EP_SOCKET_FAMILY").text;
  if (family == "AF_INET") choice.family = AF_INET;
  if (family == "AF_INET6") choice.family = AF_INET6;
  for (const std::string& text : reader.ignored()) log::warn("{}", text);
  return choice;
}

}  // namespace deep_ep
