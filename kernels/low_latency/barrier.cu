// A barrier of the ranks that are not masked, in stream order. When it ends, all RDMA operations of earlier calls have
// arrived.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

DEEP_EP_DEVICE void barrier_body(const LowLatencyParams& common, std::byte*) {
  constexpr int kWord = LowLatencyMailbox::kBarrier;
  const DispatchCall<true> call{common, common.state->barriers.epoch(), 0};
  // This rank has come to the barrier: a near peer learns what this thread wrote before, a far one what all calls have
  // posted to it. The first channel comes last and tells it.
  block::each(common.num_ranks, [&](int peer) {
    if (masked(common, peer)) return;
    if (!call.is_far(peer)) return call.tell(peer, kWord, call.epoch);
#pragma unroll 1
    for (int channel = low_latency_channels(common.lanes) - 1; channel >= 0 && !masked(common, peer); --channel) {
      rdma::PortChannel<OneThread> port(common.queue_pair(channel, peer), common.posts);
      if (channel == 0) {
        call.tell(port, peer, kWord, call.epoch);
      } else {
        port.signal_add(call.own_word(kWord).offset, 0);  // comes behind all that was posted
      }
      port.quiet();
      port.close();
    }
  });
  block::each(common.num_ranks, [&](int peer) {
    if (masked(common, peer)) return;
    wait_signal(call, call.word_of(peer, kWord), {peer, Wanted::low_latency_barrier, call.epoch});
  });
  block::sync();
  if (thread_index() == 0) common.state->barriers.count(call.epoch);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(barrier_low_latency, deep_ep::device::low_latency::barrier_body)
