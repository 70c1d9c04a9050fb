// A barrier of the ranks that are not masked, in stream order.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/transport/poster.hpp"
#include "kernels/low_latency/transport/watch.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By one thread: tells `peer` that this rank has come to barrier `epoch`, releasing what the thread wrote before.
DEEP_EP_DEVICE void announce_barrier(const LowLatencyParams& common, int peer, std::uint64_t epoch) {
  const Place<std::uint64_t> place = common.window.barrier(common.rank);
  if (!Reach<true>{common}.is_far(peer)) return store_release<Scope::system>(place.in(common.heaps[peer]), epoch);
  const WaitContext wait = begin_to_post(common, peer);
  rdma::Poster<OneThread, MaskOrEnd> poster(queue_pair(common, static_cast<int>(LowLatencyChannel::barrier), peer),
                                            wait, {common});
  rdma::ToldWord word = poster.word(place, common.told[peer].barrier);
  poster.tell(word, epoch);
  poster.close();
}

/// By all threads: waits until far peers see all that calls have posted to them, as the barrier goes by queue pairs of
/// its own. (Sums that a relay posts have been received: see clean().)
DEEP_EP_DEVICE void drain_calls(const LowLatencyParams& common) {
#pragma unroll 1
  for (int i = thread_index(); i < common.num_ranks * common.lanes; i += block_threads()) {
    const int peer = i / common.lanes;
    const int lane = i % common.lanes;
    if (!Reach<true>{common}.is_far(peer)) continue;
#pragma unroll 1
    for (int kind = 0; kind < static_cast<int>(kLowLatencyKinds) && !masked(common, peer); ++kind) {
      const WaitContext wait = begin_to_post(common, peer, lane);
      const int channel = channel_of(static_cast<LowLatencyKind>(kind), lane);
      rdma::Poster<OneThread, MaskOrEnd> poster(queue_pair(common, channel, peer), wait, {common});
      poster.settle(common.window.barrier(common.rank));
      poster.close();
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
    wait_signal(MaskOrEnd{common}, word, {peer, Wanted::low_latency_barrier, epoch});
  }
  block::sync();
  if (thread_index() == 0) common.state->barriers.count(epoch);
}

/// Two blocks: see watch.hpp.
DEEP_EP_DEVICE void barrier_watched_body(const LowLatencyBarrierParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  std::uint32_t* ended = &common.state->watch.ended[kLowLatencyKinds];
  if (block_index() + 1 != grid_blocks()) {
    begin_watched(common);
    barrier_body(params, memory);
    return end_watched(ended);
  }
  if (thread_index() != 0) return;
  // Of the next barrier, if the other block has counted this one already; then it is about to end.
  const WatchedCall call{LowLatencyKind::dispatch, 0, 0, common.state->barriers.epoch()};
  auto* peers = reinterpret_cast<WatchedPeer*>(memory);
  if (common.peers == nullptr) {
    watch_until_all_ended(Watcher(common, call, peers, now_ns()), ended);
  } else {
    watch_until_all_ended(FarWatcher<NoDebts>(common, {}, call, peers, now_ns()), ended);
  }
}

template <class AnyWatcher>
DEEP_EP_DEVICE void change_masks(const LowLatencyMasksParams& params, AnyWatcher watcher) {
  switch (params.step) {
    case LowLatencyMasksStep::unmask:
      return watcher.unmask(params.rank);
    case LowLatencyMasksStep::mask:
      return watcher.mask(params.rank);
    case LowLatencyMasksStep::hear:
      return watcher.hear();
    case LowLatencyMasksStep::tell_ending:
      return watcher.tell_ending(params.ending);
  }
}

/// One thread.
DEEP_EP_DEVICE void change_masks_watched_body(const LowLatencyMasksParams& params, std::byte* memory) {
  if (thread_index() != 0) return;
  const LowLatencyParams& common = params.common;
  const WatchedCall no_call{LowLatencyKind::dispatch, 0, 0, 0};
  auto* peers = reinterpret_cast<WatchedPeer*>(memory);
  if (common.peers == nullptr) {
    change_masks(params, Watcher(common, no_call, peers, now_ns()));
  } else {
    change_masks(params, FarWatcher<NoDebts>(common, {}, no_call, peers, now_ns()));
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(barrier_low_latency, deep_ep::device::low_latency::barrier_body)
DEEP_EP_DEFINE_KERNEL(barrier_low_latency_watched, deep_ep::device::low_latency::barrier_watched_body)
DEEP_EP_DEFINE_KERNEL(change_masks_low_latency_watched, deep_ep::device::low_latency::change_masks_watched_body)
