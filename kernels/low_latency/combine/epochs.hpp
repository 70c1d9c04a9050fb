// How a kernel of combine begins.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/low_latency/transport/reach.hpp"

namespace deep_ep::device::low_latency {

/// Which call is this? One warp, the clerk, reads the counters for all, and afterwards does what nobody waits for: it
/// tells the peers which call this rank is done with, and moves the counters on.
template <class Reach>
DEEP_EP_DEVICE LowLatencyEpochs find_epochs(const LowLatencyCombineParams& params, CombineShared::Words& shared,
                                            bool clerk) {
  const LowLatencyParams& common = params.common;
  LowLatencyCounters& counters = common.counters(LowLatencyKind::combine);
  if (clerk && lane_index() == 0) {
    // Loaded before the first of them is stored, so that the block waits once.
    const std::uint32_t call = sends(params.phase) ? call_of(params) : 0;
    const LowLatencyEpochs epochs = counters.epochs();
    shared.call = call;
    shared.epochs = epochs;
    note_masks(common, shared.masks);
  }
  block::sync();
  const LowLatencyEpochs epochs = shared.epochs;
  if (!clerk) return epochs;
  const Reach reach(common, epochs.send, params.row_bytes);
  for (int peer = lane_index(); block_index() == 0 && peer < common.num_ranks; peer += kWarpSize) {
    if (masked(common, peer)) continue;
    reach.acknowledge(peer, epochs.receive - 1);
    if (common.mask != nullptr && sends(params.phase)) reach.begin(peer);
  }
  if (lane_index() == 0) counters.arrive(epochs, params.phase);
  warp::sync();
  return epochs;
}

}  // namespace deep_ep::device::low_latency
