// A barrier of the ranks that are not masked, in stream order.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/transport/peer.hpp"
#include "kernels/low_latency/transport/poster.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// By one thread: signals a rank that is reached by RDMA.
DEEP_EP_DEVICE void signal_far(const LowLatencyParams& common, int peer, std::uint64_t epoch) {
  const int channel = static_cast<int>(LowLatencyChannel::barrier);
  const RdmaPeerParams& pair = common.rdma.peers[channel * common.num_ranks + peer];
  LowLatencyTold& told = common.rdma.told[peer];
  if (common.mask != nullptr) store_relaxed<Scope::gpu>(&told.stopped, 0);
  const WaitContext context = context_of_queue(common, peer);
  rdma::RdmaPeer<OneThread> queue(pair, context);
  const bool posted = queue.signal_add(common.window.barrier_at(common.rank), epoch - told.barrier);
  if (posted) told.barrier = epoch;
  if (!queue.close()) blame_queue(common, pair.queue);
}

DEEP_EP_DEVICE void low_latency_barrier_body(const LowLatencyBarrierParams& params, std::byte*) {
  const LowLatencyParams& common = params.common;
  const std::uint64_t epoch = load_relaxed<Scope::gpu>(&common.state->barriers) + 1;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (masked(common, peer)) continue;
    if (is_far(common, peer)) {
      signal_far(common, peer, epoch);
      continue;
    }
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

DEEP_EP_DEFINE_KERNEL(barrier_low_latency, deep_ep::device::low_latency_barrier_body)
