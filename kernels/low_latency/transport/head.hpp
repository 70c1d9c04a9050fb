// How every low-latency kernel begins: which call is it? And how it tells the peers how far this rank has come.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/low_latency/transport/peer.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// Calls of one kind that this rank had sent and received when the kernel began.
struct Epochs {
  std::uint64_t sent;
  std::uint64_t received;
};

DEEP_EP_DEVICE LowLatencyCounters& counters_of(const LowLatencyParams& common, LowLatencyKind kind) {
  return common.state->counters[static_cast<int>(kind)];
}

/// By one thread of a block: ask once, so that the word is not what all warps of the GPU meet at.
DEEP_EP_DEVICE Epochs read_epochs(const LowLatencyParams& common, LowLatencyKind kind) {
  const LowLatencyCounters& counters = counters_of(common, kind);
  return {load_relaxed<Scope::gpu>(&counters.sent), load_relaxed<Scope::gpu>(&counters.received)};
}

/// By one thread of every block, after read_epochs and whenever it has time: the last one moves the counters on.
DEEP_EP_DEVICE void arrive_at_epoch(const LowLatencyParams& common, LowLatencyKind kind, const Epochs& before,
                                    LowLatencyPhase phase) {
  LowLatencyCounters& counters = counters_of(common, kind);
  const std::uint32_t arrived = fetch_add_acq_rel<Scope::gpu>(&counters.arrived, std::uint32_t{1}) + 1;
  if (arrived != static_cast<std::uint32_t>(grid_blocks())) return;
  store_relaxed<Scope::gpu>(&counters.arrived, 0);
  if (sends(phase)) store_relaxed<Scope::gpu>(&counters.sent, before.sent + 1);
  if (receives(phase)) store_relaxed<Scope::gpu>(&counters.received, before.received + 1);
}

/// Where `peer` says up to which call it has received.
DEEP_EP_DEVICE const std::uint64_t* acknowledged_word(const LowLatencyParams& common, LowLatencyKind kind, int peer) {
  return reinterpret_cast<const std::uint64_t*>(common.local + common.window.acknowledged_at(kind, peer));
}

/// By one thread a peer: tells it up to which call this rank has received. That it says so before this kernel's own
/// receive part, and kernels follow each other, means that all reading of that call has ended.
DEEP_EP_DEVICE void acknowledge(const LowLatencyParams& common, LowLatencyKind kind, int peer, std::uint64_t received) {
  std::byte* word = common.heaps[peer] + common.window.acknowledged_at(kind, common.rank);
  store_after_earlier_reads<Scope::system>(reinterpret_cast<std::uint64_t*>(word), received);
}

}  // namespace deep_ep::device
