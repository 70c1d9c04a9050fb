// How many connections a low-latency call's rows take in turn to a rank that is reached by RDMA.
#pragma once

#include <vector>

#include "csrc/memory/node_membership.hpp"
#include "deep_ep/options.hpp"

namespace deep_ep {

/// What LowLatencyOptions::lanes means: where it is 0, DEEP_EP_LOW_LATENCY_LANES; 0 where that is auto.
/// InvalidArgument.
int asked_for_lanes(int asked);
/// InvalidArgument for what LowLatencyOptions::lanes cannot be.
void check_lanes(int asked);

/// What a rank knows of its network.
struct LaneFacts {
  int far = 0;                 ///< ranks that it reaches by RDMA
  bool keeps_to_path = false;  ///< by a network that keeps each connection on one path
};

/// A connection is one flow, which an Ethernet network sends by one of several paths; with few flows some paths get
/// several and others none. So on Ethernet: lanes until a rank has 32 flows, at most kMostLowLatencyLanes.
int lanes_for(const LaneFacts& facts);

/// As many as the rank wants that wants most. `keeps_to_path`: of each rank.
int lanes_of_all(const LowLatencyOptions& options, NodeMembership nodes, const std::vector<bool>& keeps_to_path);

}  // namespace deep_ep
