// What queue pairs made by DevX must be told of their port, and queue pairs made by the kernel get from it.
#pragma once

#include <cstdint>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"

namespace deep_ep::rdma::verbs::devx {

struct PortTraits {
  /// Of the port's hw_counters: without it, losses and retries of a queue pair are counted nowhere. 0: not known.
  std::uint8_t counter_set = 0;
  /// Physical ports that are bonded, where queue pairs choose between them; otherwise 0.
  std::uint8_t bonded_ports = 0;
};

/// Never throws because the device does not answer: what is not known is left out, and logged.
PortTraits port_traits(const Context& context, const PathOptions& path);

}  // namespace deep_ep::rdma::verbs::devx
