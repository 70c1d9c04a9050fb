// A barrier of the ranks that are not masked, in stream order.
#include "kernels/low_latency/peer.hpp"
#include "kernels/low_latency/wait.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void low_latency_barrier_body(const LowLatencyBarrierParams& params, std::byte*) {
  const LowLatencyParams& common = params.common;
  const std::uint64_t epoch = load_relaxed<Scope::gpu>(&common.state->barriers) + 1;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (masked(common, peer)) continue;
    Peer{common.heaps[peer]}.signal(common.window.barrier_at(common.rank), epoch);
  }
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (masked(common, peer)) continue;
    const auto* word = reinterpret_cast<const std::uint64_t*>(common.local + common.window.barrier_at(peer));
    wait_for_signal(common, word, epoch, peer, Wanted::low_latency_barrier);
  }
  block::sync();
  if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->barriers, epoch);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(barrier_low_latency, deep_ep::LowLatencyBarrierParams, deep_ep::device::low_latency_barrier_body,
                      128)
