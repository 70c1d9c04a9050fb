// Arguments of all kernels whose ranks meet in a node: normal mode, the second interface, replicas of experts,
// barriers.
#pragma once

#include <cstdint>

#include "kernels/common/call.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/normal/control_window.hpp"

namespace deep_ep {

/// This rank's own counters, in device memory. Zero when the buffer is made.
struct KernelState {
  CallCounter notify, dispatch, combine, barrier, load_balance;
  CallCounter transfer;              ///< between nodes: dispatches and combines, which share the rings
  std::uint64_t selections_counted;  ///< see NumberingParams
  // Tokens, parts of one, or pieces of an expert that warps have drawn (see Turns); zero between calls. SMs differ in
  // speed: if all were shared out beforehand, the call would be as slow as the slowest.
  std::uint32_t pieces_drawn;
  std::uint32_t elastic_rows_drawn;        ///< to be pushed
  std::uint32_t local_tickets[kMaxRanks];  ///< rows of a dispatch for each local ring
};

/// What every kernel gets that signals to the ranks of its node.
struct IntranodeParams {
  int rank = 0;
  int num_ranks = 0;
  std::byte* const* heaps = nullptr;  ///< heap base of every rank of the node as this rank maps it; readable by kernels
  ControlWindow control;
  KernelState* state = nullptr;
  WaitContext wait;

  DEEP_EP_DEVICE std::byte* own_heap() const { return heaps[rank]; }
  DEEP_EP_DEVICE std::uint64_t* signal_to(int peer, IntranodeSignal kind) const {
    return control.signal(heaps[peer], kind, rank);
  }
  DEEP_EP_DEVICE const std::uint64_t* signal_from(int peer, IntranodeSignal kind) const {
    return control.signal(own_heap(), kind, peer);
  }
};

}  // namespace deep_ep
