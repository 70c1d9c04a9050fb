#include "csrc/bootstrap/interfaces.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/text.hpp"
#include "csrc/support/unique_fd.hpp"
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

const InterfaceAddress* SocketChoice::find(std::span<const InterfaceAddress> addresses, int wanted) const {
  if (!interfaces) return nullptr;
  const auto one = std::ranges::find_if(addresses, [&](const InterfaceAddress& address) {
    return address.address.ss_family == wanted && interfaces->matches(address.interface);
  });
  return one == addresses.end() ? nullptr : &*one;
}

SocketChoice read_socket_choice(const environment::Source& source) {
  SocketChoice choice;
  environment::Reader reader(source);
  choice.interfaces = reader.read("DEEP_EP_SOCKET_IFNAME", [&](const environment::Value& value) {
    choice.variable = fmt::format("{}={}", value.name, value.text);
    return InterfaceFilter(value.text, value.name == "GLOO_SOCKET_IFNAME");
  });
  const std::string family = reader.choice("DEEP_EP_SOCKET_FAMILY");
  if (family == "AF_INET") choice.family = AF_INET;
  if (family == "AF_INET6") choice.family = AF_INET6;
  for (const std::string& text : reader.ignored()) log::warn("{}", text);
  return choice;
}

namespace {

/// Would the system call from an interface that may be used? A list of those that may not ("^docker") leaves many, of
/// which most do not lead there.
bool route_is_allowed(const addrinfo& to, const SocketChoice& choice, std::span<const InterfaceAddress> addresses) {
  const UniqueFd probe(::socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (::connect(probe.get(), to.ai_addr, to.ai_addrlen) != 0) return false;  // sends nothing
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&from), &size) != 0) return false;
  return std::ranges::any_of(addresses, [&](const InterfaceAddress& one) {
    if (one.address.ss_family != from.ss_family || !choice.interfaces->matches(one.interface)) return false;
    if (from.ss_family == AF_INET) {
      return reinterpret_cast<const sockaddr_in&>(one.address).sin_addr.s_addr ==
             reinterpret_cast<const sockaddr_in&>(from).sin_addr.s_addr;
    }
    return std::memcmp(&reinterpret_cast<const sockaddr_in6&>(one.address).sin6_addr,
                       &reinterpret_cast<const sockaddr_in6&>(from).sin6_addr, sizeof(in6_addr)) == 0;
  });
}

}  // namespace

void leave_by_chosen_interface(int socket, const addrinfo& to, const SocketChoice& choice) {
  if (!choice.interfaces) return;
  const int family = to.ai_family;
  const std::vector<InterfaceAddress> addresses = interface_addresses();
  if (route_is_allowed(to, choice, addresses)) return;
  const InterfaceAddress* from = choice.find(addresses, family);
  // The port is the system's choice, as without this.
  if (from != nullptr && ::bind(socket, reinterpret_cast<const sockaddr*>(&from->address), from->size) == 0) return;
  static std::atomic<bool> said = false;
  if (said.exchange(true)) return;
  log::warn("{}: no interface of that name has an {} address to call from; the route to the other side decides",
            choice.variable, family == AF_INET6 ? "IPv6" : "IPv4");
}

}  // namespace deep_ep
