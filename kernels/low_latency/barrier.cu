// A barrier of the ranks that are not masked, in stream order.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By one thread: tells `peer` that this rank has come to barrier `epoch`, releasing what the thread wrote before.
DEEP_EP_DEVICE void announce_barrier(const LowLatencyParams& common, int peer, std::uint64_t epoch) {
  const Place<std::uint64_t> place = common.window.barrier(common.rank);
  if (!Topology<true>{common}.is_far(peer)) return store_release<Scope::system>(place.in(common.heaps[peer]), epoch);
  const RdmaPeerParams& pair = common.queue_pair(barrier_channel(common.lanes), peer);
  rdma::PortChannel<OneThread> port(pair, common.posts);
  port.signal(place, common.told[peer].mailbox[0].barrier, epoch);
  if (!port.close()) MaskOrEnd<true>{common}.blame_queue(pair.queue);
}

/// By all threads: waits until far peers see all that calls have posted to them, as the barrier goes by queue pairs of
/// its own.
DEEP_EP_DEVICE void drain_calls(const LowLatencyParams& common) {
#pragma unroll 1
  for (int i = thread_index(); i < common.num_ranks * common.lanes; i += block_threads()) {
    const int peer = i / common.lanes;
    const int lane = i % common.lanes;
    if (!Topology<true>{common}.is_far(peer)) continue;
#pragma unroll 1
    for (int kind = 0; kind < static_cast<int>(kLowLatencyKinds) && !masked(common, peer); ++kind) {
      const RdmaPeerParams& pair = common.queue_pair(channel_of(static_cast<LowLatencyKind>(kind), lane), peer);
      rdma::PortChannel<OneThread> port(pair, common.posts);
      // An addition of nothing comes behind all that was posted.
      port.signal_add(common.window.barrier(common.rank).offset, 0);
      port.quiet();
      if (!port.close()) MaskOrEnd<true>{common}.blame_queue(pair.queue);
    }
  }
  block::sync();
}

DEEP_EP_DEVICE void barrier_body(const LowLatencyBarrierParams& params, std::byte*) {
  const LowLatencyParams& common = params.common;
  if (params.drains) drain_calls(common);
  const std::uint64_t epoch = common.state->barriers.epoch();
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (!masked(common, peer)) announce_barrier(common, peer, epoch);
  }
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (masked(common, peer)) continue;
    const std::uint64_t* word = common.window.barrier(peer).in(common.local);
    wait_signal(MaskOrEnd<true>{common}, word, {peer, Wanted::low_latency_barrier, epoch});
  }
  block::sync();
  if (thread_index() == 0) common.state->barriers.count(epoch);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(barrier_low_latency, deep_ep::device::low_latency::barrier_body)
