// The plan of a buffer: its memory, the way by which low-latency calls reach other ranks, and its queue pairs. The plan
// follows from the options and from which rank is on which node, before anything is allocated.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/normal/control_window.hpp"

namespace deep_ep {

/// Where everything lies in a rank's heap: the same on all ranks, so that an offset of one is an offset of all. In this
/// order: signals of normal mode, a line for ConnectionOptions::sink, memory of low-latency calls (signals, then rows),
/// what NICs fetch from, the bounded window, and up to the end the arena for received tensors.
struct HeapLayout {
  ControlWindow control;
  LowLatencyWindow low_latency;  ///< bytes 0: none
  std::size_t window_bytes = 0, arena_bytes = 0;

  std::size_t sink_at() const { return control.bytes; }
  std::size_t low_latency_at() const { return sink_at() + kLine; }
  std::size_t window_at() const { return low_latency_at() + low_latency.bytes + low_latency.staging_bytes; }
  std::size_t arena_at() const { return window_at() + window_bytes; }
  std::size_t bytes() const { return arena_at() + arena_bytes; }
};

/// Which ranks low-latency calls of a rank reach by RDMA, and whether their rows may go by rails: see LowLatencyRails.
struct LowLatencyReach {
  std::vector<int> far;           ///< ranks that are reached by RDMA
  int node_width = 0;             ///< see LowLatencyParams
  int rail_width = 0;             ///< ranks of a node, where calls may go by rails; else 0
  bool rails_always = false;      ///< wherever they may; else where they pay
  const char* why_no_rails = "";  ///< where they may not
};

struct BufferPlan {
  BufferOptions options = {};  ///< with memory for these nodes: see InternodeOptions::heap_bytes
  NodeMembership nodes = {};
  HeapLayout layout = {};
  LowLatencyReach reach = {};  ///< of low-latency calls
  NodeGrid grid = {};          ///< of normal mode; one node, too, where nodes are not alike

  /// `options`: as all ranks agree on them. InvalidArgument where they leave too little room.
  static BufferPlan make(const BufferOptions& options, const NodeMembership& nodes);
  /// Sets the lanes that the options leave open, and bounds those of normal mode by num_qps_per_rank. A lane is one
  /// flow, which an Ethernet network sends by one of several paths: so there are more on Ethernet, in low-latency calls
  /// until each rank has 32 flows.
  void choose_lanes(const rdma::AgreedWire& wire);

  /// Places in connections().
  static constexpr std::size_t kLowLatency = 0;
  static constexpr std::size_t kNormalMode = 1;
  /// Queue pairs to the ranks that low-latency calls reach by RDMA, and of normal mode to the rails in other nodes.
  /// Lanes that are still open: one.
  std::array<rdma::ConnectionOptions, 2> connections() const;
};

}  // namespace deep_ep
