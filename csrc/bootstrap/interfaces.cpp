#include "csrc/bootstrap/interfaces.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

InterfaceFilter::InterfaceFilter(std::string_view text, bool exact) : exact_(exact), excludes_(false) {
  text = trim(text);
  if (text.starts_with('^')) {
    excludes_ = true;
    text.remove_prefix(1);
  }
  if (text.starts_with('=')) {
    exact_ = true;
    text.remove_prefix(1);
  }
  for (const std::string_view name : split(text, ',')) {
    if (name.empty()) throw InvalidArgument("there is an empty name; allowed: [^][=]<interface>,...");
    names_.emplace_back(name);
  }
}

bool InterfaceFilter::matches(std::string_view interface) const {
  return std::ranges::any_of(names_, [&](const std::string& name) { return names(name, interface); }) != excludes_;
}

std::vector<std::string> InterfaceFilter::without_match(std::span<const std::string> interfaces) const {
  std::vector<std::string> found;
  std::ranges::copy_if(names_, std::back_inserter(found), [&](const std::string& name) {
    return std::ranges::none_of(interfaces, [&](const std::string& interface) { return names(name, interface); });
  });
  return found;
}

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

InterfaceFilter parse_interfaces(const environment::Value& value) {
  return InterfaceFilter(value.text, value.name == "GLOO_SOCKET_IFNAME");
}

SocketChoice read_socket_choice(const environment::Source& source) {
  SocketChoice choice;
  environment::Reader reader(source);
  choice.interfaces = reader.read("DEEP_EP_SOCKET_IFNAME", parse_interfaces);
  const std::string family = reader.choice("DEEP_EP_SOCKET_FAMILY");
  if (family == "AF_INET") choice.family = AF_INET;
  if (family == "AF_INET6") choice.family = AF_INET6;
  for (const std::string& text : reader.ignored()) log::warn("{}", text);
  return choice;
}

}  // namespace deep_ep
