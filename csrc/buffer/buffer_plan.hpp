// The plan of a buffer: its memory, the way by which low-latency calls reach other ranks, and its queue pairs. The plan
// follows from the options and from which rank is on which node, before anything is allocated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/normal/control_window.hpp"
#include "kernels/normal/rings.hpp"

namespace deep_ep {

/// Where everything lies in a rank's heap: the same on all ranks, so that an offset of one is an offset of all. In this
/// order: signals of normal mode, memory of low-latency calls (signals, then rows), what NICs fetch from, signals of
/// normal mode between nodes, the bounded window, and up to the end the arena for received tensors.
struct HeapLayout {
  ControlWindow control;
  LowLatencyWindow low_latency;  ///< bytes 0: none
  LowLatencyStaging staging;     ///< bytes 0: none
  RailWindow internode;          ///< bytes 0: none
  std::size_t window_bytes = 0;
  std::size_t asked_bytes = 0;  ///< heap_bytes of the options, and what low_latency.bytes takes

  /// For nodes of `width` ranks, without staging. OutOfMemory and InvalidArgument where the options leave too little
  /// room.
  static HeapLayout make(const BufferOptions& options, int num_ranks, int width);
  /// The most that signals of normal mode take, whatever the size of the window, with other options at default.
  static std::size_t most_signal_bytes(int num_ranks);

  std::size_t staging_at() const { return control.bytes() + low_latency.bytes; }
  std::size_t internode_at() const { return staging_at() + staging.bytes; }
  std::size_t window_at() const { return internode_at() + internode.bytes; }
  std::size_t arena_at() const { return window_at() + window_bytes; }
  std::size_t bytes() const { return asked_bytes + staging.bytes + internode.bytes; }
};

/// Which ranks low-latency calls of a rank reach by RDMA, and whether their rows may go by rails: see LowLatencyRails.
struct LowLatencyReach {
  std::vector<int> far;           ///< ranks that are reached by RDMA
  int rail_width = 0;             ///< ranks of a node, where calls may go by rails; else 0
  bool rails_always = false;      ///< wherever they may; else where they pay
  const char* why_no_rails = "";  ///< where they may not
};

/// Lanes of low-latency calls of a rank that reaches `far` ranks by RDMA. A connection is one flow, which an Ethernet
/// network sends by one of several paths (`keeps_to_path`); with few flows some paths get several and others none. So
/// on Ethernet: lanes until a rank has 32 flows, at most kMostLowLatencyLanes.
int lanes_for(int far, bool keeps_to_path);
/// Queue pairs of low-latency calls to the ranks `far` that they reach by RDMA, by `lanes` lanes.
rdma::ConnectionOptions low_latency_connections(const std::vector<int>& far, int lanes);
/// Queue pairs of normal mode to the rails in other nodes, by `lanes` lanes.
rdma::ConnectionOptions internode_connections(const NodeGrid& grid, int lanes);

/// See InternodeOptions::heap_bytes.
BufferOptions with_memory_for(int num_nodes, BufferOptions options);

struct BufferPlan {
  BufferOptions options;  ///< with memory for these nodes
  HeapLayout layout;
  LowLatencyReach reach;  ///< of low-latency calls
  NodeGrid grid;          ///< of normal mode; one node, too, where nodes are not alike

  /// `options`: as all ranks agree on them. OutOfMemory and InvalidArgument where options leave too little room.
  static BufferPlan make(const BufferOptions& options, const NodeMembership& nodes);
  /// Sets the lanes that the options leave open.
  void choose_lanes(const NodeMembership& nodes, const rdma::AgreedWire& wire);

  /// Places in connections().
  static constexpr std::size_t kLowLatency = 0;
  static constexpr std::size_t kNormalMode = 1;
  std::array<rdma::ConnectionOptions, 2> connections() const;  ///< lanes that are still open: one
  std::size_t queue_pairs() const;
};

}  // namespace deep_ep
