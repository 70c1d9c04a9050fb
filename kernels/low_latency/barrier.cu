// A barrier of the ranks that are not masked, in stream order.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

using BarrierCall = DispatchCall<true>;
constexpr int kWord = LowLatencyMailbox::kBarrier;

/// By one thread: tells `peer` that this rank has come to the barrier, releasing what the thread wrote before.
DEEP_EP_DEVICE void announce_barrier(const BarrierCall& call, int peer) {
  const LowLatencyParams& common = call.common;
  if (!call.is_far(peer)) return call.tell(peer, kWord, call.epoch);
  rdma::PortChannel<OneThread> port(common.queue_pair(barrier_channel(common.lanes), peer), common.posts);
  call.tell(port, peer, kWord, call.epoch);
  port.close();
}

/// By all threads: waits until far peers see all that calls have posted to them, as the barrier goes by queue pairs of
/// its own.
DEEP_EP_DEVICE void drain_calls(const BarrierCall& call) {
  const LowLatencyParams& common = call.common;
  block::each(common.num_ranks * common.lanes, [&](int i) {
    const int peer = i / common.lanes;
    if (!call.is_far(peer)) return;
#pragma unroll 1
    for (int kind = 0; kind < static_cast<int>(kLowLatencyKinds) && !masked(common, peer); ++kind) {
      const int channel = channel_of(static_cast<LowLatencyKind>(kind), i % common.lanes);
      rdma::PortChannel<OneThread> port(common.queue_pair(channel, peer), common.posts);
      // An addition of nothing comes behind all that was posted.
      port.signal_add(call.own_word(kWord).offset, 0);
      port.quiet();
      port.close();
    }
  });
  block::sync();
}

DEEP_EP_DEVICE void barrier_body(const LowLatencyBarrierParams& params, std::byte*) {
  const LowLatencyParams& common = params.common;
  const BarrierCall call(common, common.state->barriers.epoch(), 0);
  if (params.drains) drain_calls(call);
  block::each(common.num_ranks, [&](int peer) {
    if (!masked(common, peer)) announce_barrier(call, peer);
  });
  block::each(common.num_ranks, [&](int peer) {
    if (masked(common, peer)) return;
    wait_signal(call.policy(), call.word_of(peer, kWord), {peer, Wanted::low_latency_barrier, call.epoch});
  });
  block::sync();
  if (thread_index() == 0) common.state->barriers.count(call.epoch);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(barrier_low_latency, deep_ep::device::low_latency::barrier_body)
