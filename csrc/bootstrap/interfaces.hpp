// Which network interface and which kind of address the library's own TCP connections take: DEEP_EP_SOCKET_IFNAME,
// DEEP_EP_SOCKET_FAMILY and those of other libraries that stand for them.
#pragma once

#include <sys/socket.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/environment.hpp"

namespace deep_ep {

/// A list of interfaces in NCCL's grammar: "eth,ib" beginnings of names, "=eth0" whole names, "^docker" all but these,
/// "^=lo".
class InterfaceFilter {
 public:
  InterfaceFilter() = default;
  /// `exact`: names are whole ones without a `=`, as Gloo has them. InvalidArgument where a name is empty.
  explicit InterfaceFilter(std::string_view text, bool exact = false);
  bool matches(std::string_view interface) const;
  /// Names of the list that none of `interfaces` has.
  std::vector<std::string> without_match(std::span<const std::string> interfaces) const;

 private:
  bool names(const std::string& name, std::string_view interface) const {
    return exact_ ? interface == name : interface.starts_with(name);
  }

  std::vector<std::string> names_;
  bool exact_ = false;
  bool excludes_ = true;  ///< with no names: all match
};

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
  std::optional<InterfaceFilter> interfaces;
  int family = AF_UNSPEC;
};
/// Of DEEP_EP_SOCKET_IFNAME: names in Gloo's variable are whole.
InterfaceFilter parse_interfaces(const environment::Value& value);
/// InvalidArgument where an own variable is wrong.
SocketChoice read_socket_choice(const environment::Source& source = environment::of_process);

}  // namespace deep_ep
