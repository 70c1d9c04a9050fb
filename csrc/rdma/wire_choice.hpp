// Over which wire ranks reach each other by RDMA. Plain data and plain rules, so that they are tested without a NIC.
#pragma once

#include <array>
#include <span>
#include <string>

#include "csrc/memory/process_identity.hpp"
#include "csrc/rdma/discovery/settings.hpp"

namespace deep_ep::rdma {

/// What one rank knows; all-gathered, so that every rank decides on the same facts.
struct WireFacts {
  ProcessIdentity process;
  WireSetting wanted;
  bool needs_rdma = false;  ///< it reaches at least one rank by RDMA
  NicHandler handler = NicHandler::automatic;
  std::array<char, 400> why_no_nic{};  ///< empty: it has one
};

/// automatic: `verbs` if every rank that needs RDMA has a NIC, or if they are on several hosts; else `local`, with the
/// first reason in `why_local`. Throws the same on every rank: RankMismatch when they ask for different wires,
/// SystemError, naming a rank, when a wire cannot work. Without a rank that needs RDMA: `local`.
WireKind choose_wire(std::span<const WireFacts> ranks, std::string& why_local);

}  // namespace deep_ep::rdma
