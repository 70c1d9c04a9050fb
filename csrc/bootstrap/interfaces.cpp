#include "csrc/bootstrap/interfaces.hpp"

#include <net/if.h>
#include <netinet/in.h>

#include <cstring>
#include <memory>
#include <string_view>

#include "csrc/support/logging.hpp"

namespace deep_ep {

SocketAddress own_address(const SocketChoice& choice, const ifaddrs* list) {
  ifaddrs* found_list = nullptr;
  if (list == nullptr && ::getifaddrs(&found_list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(found_list, &::freeifaddrs);
  SocketAddress last, loopback;
  for (const ifaddrs* one = list != nullptr ? list : found_list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (choice.family != AF_UNSPEC ? family != choice.family : family != AF_INET && family != AF_INET6) continue;
    SocketAddress found;
    found.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&found.at, one->ifa_addr, found.size);
    const bool link_local =
        family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(found.at).sin6_addr);
    if (link_local || !choice.interfaces.allows(one->ifa_name)) continue;
    const bool loops = (one->ifa_flags & IFF_LOOPBACK) != 0, runs = (one->ifa_flags & IFF_RUNNING) != 0;
    if (runs && !loops && !std::string_view(one->ifa_name).starts_with("docker")) return found;
    SocketAddress& later = loops ? loopback : last;
    if (later.size == 0) later = found;
  }
  return last.size != 0 ? last : loopback;
}

DeviceFilter parse_interfaces(const environment::Value& value) {
  return {value, /*prefixes=*/value.name != "GLOO_SOCKET_IFNAME", ListOf::names};
}

SocketChoice read_socket_choice(const environment::Source& source) {
  SocketChoice choice;
  environment::Reader reader{source};
  choice.interfaces = reader.read("DEEP_EP_SOCKET_IFNAME", parse_interfaces);
  const std::string family = reader.value("DEEP_EP_SOCKET_FAMILY").text;
  if (family == "AF_INET") choice.family = AF_INET;
  if (family == "AF_INET6") choice.family = AF_INET6;
  for (const std::string& text : reader.ignored) log::warn("{}", text);
  return choice;
}

}  // namespace deep_ep
