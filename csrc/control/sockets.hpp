// The ports at which control threads listen.
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::control {

struct PortRange {
  std::uint16_t first = 0;  ///< 0: the system chooses
  std::uint16_t last = 0;
};
/// "40000" or "40000-40100". InvalidArgument says what is allowed.
PortRange parse_ports(std::string_view text);

/// On the interface that own_address() chooses. SystemError names address and ports.
UniqueFd listen_by_tcp(const PortRange& ports, SocketAddress& address);

}  // namespace deep_ep::control
