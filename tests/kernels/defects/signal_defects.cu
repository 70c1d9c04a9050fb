// Mistakes between blocks (or ranks): data and the signal that announces it.
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/defects/defects.hpp"

namespace deep_ep::device {
namespace {

using defects::kRowWords;
using defects::Params;

DEEP_EP_DEVICE void wait_for(const std::uint64_t* signal, std::uint64_t value) {
  for (int spins = 0; load_acquire<Scope::system>(signal) < value; ++spins) pause(spins);
}

/// The receiver: lane i reports the first word of the row's i-th Vec16.
DEEP_EP_DEVICE void receive(const Params& p, std::uint64_t expected) {
  if (lane_index() == 0) wait_for(p.signal, expected);
  warp::sync();
  p.result[lane_index()] = load_weak(p.destination + lane_index()).word[0];
  warp::sync();
  if (lane_index() == 0) store_release<Scope::system>(p.signal + 1, p.epoch);  // the sender may leave
}

/// Planted: the flag orders nothing.
DEEP_EP_DEVICE void relaxed_flag(const Params& p, std::byte*) {
  if (block_index() == 1) return receive(p, p.epoch);
  store_stream(p.destination + lane_index(), p.source[lane_index()]);
  warp::sync();
  if (lane_index() != 0) return;
  if (p.planted) {
    store_relaxed<Scope::system>(p.signal, p.epoch);
  } else {
    store_release<Scope::system>(p.signal, p.epoch);
  }
}

/// Planted: wait_read says that the stage was read, not that the row has arrived.
DEEP_EP_DEVICE void signal_before_completion(const Params& p, std::byte* shared) {
  if (block_index() == 1) return receive(p, p.epoch);
  auto* stage = reinterpret_cast<Vec16*>(shared);
  stage[lane_index()] = p.source[lane_index()];
  bulk::publish(stage, kRowWords * sizeof(Vec16));
  warp::sync();
  if (lane_index() != 0) return;
  bulk::store(p.destination, stage, kRowWords * sizeof(Vec16));
  bulk::commit();
  if (p.planted) {
    bulk::wait_read<0>();
  } else {
    bulk::wait<0>();
    bulk::fence_global();
  }
  store_release<Scope::system>(p.signal, p.epoch);
  wait_for(p.signal + 1, p.epoch);
}

/// Planted: the receiver's bulk load may come before the signal that it has acquired.
DEEP_EP_DEVICE void load_without_fence(const Params& p, std::byte* shared) {
  if (block_index() == 0) {
    store_stream(p.destination + lane_index(), p.source[lane_index()]);
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(p.signal, p.epoch);
    return;
  }
  auto& barrier = *reinterpret_cast<Mbarrier*>(shared);
  auto* stage = reinterpret_cast<Vec16*>(shared + 128);
  if (lane_index() == 0) {
    mbarrier::init(barrier, 1);
    mbarrier::fence_init();
    wait_for(p.signal, p.epoch);
    if (!p.planted) bulk::fence_global();
    mbarrier::arrive_expect_bytes(barrier, kRowWords * sizeof(Vec16));
    bulk::load(stage, p.destination, kRowWords * sizeof(Vec16), barrier);
  }
  warp::sync();
  mbarrier::wait(barrier, 0);
  p.result[lane_index()] = stage[lane_index()].word[0];
}

/// Planted: the receiver counts from the epoch before, whose signal has come long ago.
DEEP_EP_DEVICE void wrong_epoch(const Params& p, std::byte*) {
  if (block_index() == 1) return receive(p, p.planted ? p.epoch - 1 : p.epoch);
  if (lane_index() == 0) {
    for (int spins = 0; spins < 4; ++spins) pause(spins);
  }
  warp::sync();
  Vec16 value = p.source[lane_index()];
  value.word[0] += static_cast<std::uint32_t>(p.epoch);
  store_stream(p.destination + lane_index(), value);
  warp::sync();
  if (lane_index() == 0) store_release<Scope::system>(p.signal, p.epoch);
}

/// Planted: lane 0 signals for writes of lanes that it has not synchronised with.
DEEP_EP_DEVICE void signal_without_warp_sync(const Params& p, std::byte*) {
  if (block_index() == 1) return receive(p, p.epoch);
  store_stream(p.destination + lane_index(), p.source[lane_index()]);
  if (!p.planted) warp::sync();
  if (lane_index() == 0) store_release<Scope::system>(p.signal, p.epoch);
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(defect_relaxed_flag, deep_ep::device::relaxed_flag)
DEEP_EP_DEFINE_KERNEL(defect_signal_before_completion, deep_ep::device::signal_before_completion)
DEEP_EP_DEFINE_KERNEL(defect_load_without_fence, deep_ep::device::load_without_fence)
DEEP_EP_DEFINE_KERNEL(defect_wrong_epoch, deep_ep::device::wrong_epoch)
DEEP_EP_DEFINE_KERNEL(defect_signal_without_warp_sync, deep_ep::device::signal_without_warp_sync)
