// What a buffer allocates for what its ranks exchange, and how many queue pairs it makes: follows from its options and
// from who is on which node, before anything is allocated.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "csrc/buffer/heap_layout.hpp"
#include "csrc/buffer/low_latency/rails.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/connections.hpp"

namespace deep_ep {

/// Queue pairs of low-latency calls to the ranks that they reach by RDMA.
rdma::ConnectionOptions low_latency_connections(const LowLatencyReach& reach);
/// Queue pairs of normal mode to the rails in other nodes, by `lanes` lanes; none in a grid of width 0.
rdma::ConnectionOptions internode_connections(const NodeGrid& grid, int lanes);

struct BufferPlan {
  HeapLayout layout;
  LowLatencyReach reach;      ///< of low-latency calls
  NodeGrid grid{.width = 0};  ///< of normal mode between nodes; width 0: one node, or nodes that are not alike
  int internode_lanes = 1;    ///< of normal mode to each rail, see InternodeOptions::lanes

  /// `options`: as all ranks agree on them; lanes 0 count as 1. OutOfMemory and InvalidArgument where they leave too
  /// little room.
  static BufferPlan make(const BufferOptions& options, const NodeMembership& nodes);

  /// Places in connections().
  static constexpr std::size_t kLowLatency = 0;
  static constexpr std::size_t kNormalMode = 1;
  std::array<rdma::ConnectionOptions, 2> connections() const;
  std::size_t queue_pairs() const;
};

}  // namespace deep_ep
