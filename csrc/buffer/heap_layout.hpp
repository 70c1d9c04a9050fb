// Where everything lies in a rank's heap: the same on all ranks, so that an offset of one is an offset of all.
#pragma once

#include <cstddef>

#include "deep_ep/buffer.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/intranode/control_window.hpp"
#include "kernels/low_latency/window.hpp"

namespace deep_ep {

/// In this order: signals of normal mode, memory of low-latency calls (signals, then rows), what NICs fetch from,
/// signals of normal mode between nodes, the bounded window, and up to the end the arena for received tensors.
struct HeapLayout {
  ControlWindow control;
  LowLatencyWindow low_latency;  ///< bytes 0: none
  LowLatencyStaging staging;     ///< bytes 0: none
  InternodeWindow internode;     ///< bytes 0: none
  std::size_t window_bytes = 0;
  std::size_t asked_bytes = 0;  ///< heap_bytes of the options, and what low_latency.bytes takes

  /// Without staging. OutOfMemory and InvalidArgument where the options leave too little room.
  static HeapLayout make(const BufferOptions& options, int num_ranks);
  /// The most that signals of normal mode take, whatever the size of the window.
  static std::size_t most_signal_bytes(int num_ranks, int max_local_experts);
  /// Adds what NICs fetch from, and, for `rail_nodes` nodes that are reached by rails, rows to hand on.
  void add_staging(int rail_nodes);
  /// Adds signals of normal mode between nodes; after staging.
  void add_internode(const NodeGrid& grid, int max_local_experts);

  std::size_t window_at() const { return internode_at() + internode.bytes; }
  std::size_t arena_at() const { return window_at() + window_bytes; }
  std::size_t bytes() const { return asked_bytes + staging.bytes + internode.bytes; }

 private:
  std::size_t staging_at() const { return control.bytes() + low_latency.bytes; }
  std::size_t internode_at() const { return staging_at() + staging.bytes; }
};

}  // namespace deep_ep
