// Mistakes of calls that take turns with two places for their rows: which call a flag belongs to, and when a place is
// free again. Block 0 sends, block 1 receives; one warp each. signal[0] and [1] as each kernel says.
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/defects/defects.hpp"

namespace deep_ep::device {
namespace {

using defects::kRowWords;
using defects::Params;

DEEP_EP_DEVICE void wait_until(const std::uint64_t* signal, std::uint64_t value) {
  for (int spins = 0; load_acquire<Scope::system>(signal) < value; ++spins) pause(spins);
}

/// What a sender does, or fails to do.
struct Care {
  bool waits_for_credit = true;
  bool fences_before = true;  ///< between what it has acquired and the bulk store
  bool fences_behind = true;  ///< between the bulk store and the flag
};

/// Puts the row of `epoch` into its place; it is complete there afterwards.
DEEP_EP_DEVICE void put_row(const Params& p, std::uint64_t epoch, Vec16* stage, const Care& care) {
  if (lane_index() == 0) bulk::wait_read<0>();
  warp::sync();
  Vec16 value = p.source[lane_index()];
  value.word[0] += static_cast<std::uint32_t>(epoch);
  stage[lane_index()] = value;
  bulk::publish(stage, kRowWords * sizeof(Vec16));
  warp::sync();
  if (lane_index() != 0) return;
  if (care.fences_before) bulk::fence_global();
  bulk::store(p.destination + (epoch & 1) * kRowWords, stage, kRowWords * sizeof(Vec16));
  bulk::commit();
  bulk::wait<0>();
  if (care.fences_behind) bulk::fence_global();
}

DEEP_EP_DEVICE std::uint32_t take_row(const Params& p, std::uint64_t epoch) {
  return load_weak(p.destination + (epoch & 1) * kRowWords + lane_index()).word[0];
}

/// signal: the flags of the two places, which hold the epoch. Planted: any flag will do, even the one of two calls ago.
DEEP_EP_DEVICE void flag_without_epoch(const Params& p, std::byte* shared) {
  std::uint64_t* flag = p.signal + (p.epoch & 1);
  if (block_index() == 0) {
    put_row(p, p.epoch, reinterpret_cast<Vec16*>(shared), {});
    if (lane_index() == 0) store_release<Scope::system>(flag, p.epoch);
    return;
  }
  if (lane_index() == 0) wait_until(flag, p.planted ? 1 : p.epoch);
  warp::sync();
  p.result[lane_index()] = take_row(p, p.epoch);
}

/// signal[0]: the last row that has arrived; signal[1]: the last one that has been taken. Several rows in a call.
/// The sender waits until the row before the last has been taken out of the place that it uses.
DEEP_EP_DEVICE void take_turns(const Params& p, std::byte* shared, const Care& care) {
  constexpr std::uint64_t kRowsOfCall = 6;
  const std::uint64_t before = (p.epoch - 1) * kRowsOfCall;
  std::uint32_t result = p.source[lane_index()].word[0];
  for (std::uint64_t epoch = before + 1; epoch <= before + kRowsOfCall; ++epoch) {
    if (block_index() == 0) {
      if (lane_index() == 0 && epoch > 2 && care.waits_for_credit) wait_until(p.signal + 1, epoch - 2);
      warp::sync();
      put_row(p, epoch, reinterpret_cast<Vec16*>(shared), care);
      if (lane_index() == 0) store_release<Scope::system>(p.signal, epoch);
    } else {
      if (lane_index() == 0) wait_until(p.signal, epoch);
      warp::sync();
      if (take_row(p, epoch) != p.source[lane_index()].word[0] + static_cast<std::uint32_t>(epoch)) result = 0;
      warp::sync();
      if (lane_index() == 0) store_release<Scope::system>(p.signal + 1, epoch);
    }
  }
  if (block_index() == 1) p.result[lane_index()] = result;
}

DEEP_EP_DEVICE void credit_ignored(const Params& p, std::byte* shared) {
  take_turns(p, shared, {.waits_for_credit = !p.planted});
}
DEEP_EP_DEVICE void credit_without_fence(const Params& p, std::byte* shared) {
  take_turns(p, shared, {.fences_before = !p.planted});
}
DEEP_EP_DEVICE void signal_without_fence(const Params& p, std::byte* shared) {
  take_turns(p, shared, {.fences_behind = !p.planted});
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(defect_flag_without_epoch, deep_ep::device::flag_without_epoch)
DEEP_EP_DEFINE_KERNEL(defect_credit_ignored, deep_ep::device::credit_ignored)
DEEP_EP_DEFINE_KERNEL(defect_credit_without_fence, deep_ep::device::credit_without_fence)
DEEP_EP_DEFINE_KERNEL(defect_signal_without_fence, deep_ep::device::signal_without_fence)
