// Operations of a whole warp. All 32 lanes must call the same function; lanes do not run in lockstep otherwise.
// Only sync() orders memory between the lanes. The others exchange values in registers and order nothing.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device::warp {

namespace detail {

#if DEEP_EP_TARGET_CUDA
// Applies a 32-bit shuffle to every word of a value.
template <class T, class Shuffle>
DEEP_EP_DEVICE T by_words(T value, Shuffle shuffle) {
  constexpr int kWords = (sizeof(T) + 3) / 4;
  std::uint32_t words[kWords] = {};
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = shuffle(words[i]);
  memcpy(&value, words, sizeof(T));
  return value;
}
#else
template <class T>
const std::byte* give(const char* op, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) <= 8 || sizeof(T) == 16));
  return host_machine::current_thread->machine->warp_exchange(op, &value, sizeof(T));
}
template <class T>
T taken(const std::byte* slots, int lane) {
  T value;
  std::memcpy(&value, slots + static_cast<std::ptrdiff_t>(lane) * host_machine::kExchangeSlot, sizeof(T));
  return value;
}
#endif

}  // namespace detail

/// Waits for all lanes. What any lane wrote before is visible to every lane after.
DEEP_EP_DEVICE void sync() {
#if DEEP_EP_TARGET_CUDA
  __syncwarp();
#else
  host_machine::current_thread->machine->warp_sync();
#endif
}

/// `work(i)` for each i below `count`, shared among the lanes.
template <class Work>
DEEP_EP_DEVICE void each(int count, Work work) {
#pragma unroll 1
  for (int i = lane_index(); i < count; i += kWarpSize) work(i);
}

/// The value that lane `source_lane` (modulo 32) gave. Each lane may name a different source.
template <class T>
DEEP_EP_DEVICE T shuffle(T value, int source_lane) {
#if DEEP_EP_TARGET_CUDA
  return detail::by_words(value, [=](std::uint32_t w) { return __shfl_sync(0xffffffffu, w, source_lane); });
#else
  return detail::taken<T>(detail::give("shuffle", value), source_lane & (kWarpSize - 1));
#endif
}

/// The value of lane (own lane xor mask), mask 0 to 31.
template <class T>
DEEP_EP_DEVICE T shuffle_xor(T value, int mask) {
#if DEEP_EP_TARGET_CUDA
  return detail::by_words(value, [=](std::uint32_t w) { return __shfl_xor_sync(0xffffffffu, w, mask); });
#else
  return detail::taken<T>(detail::give("shuffle_xor", value), (lane_index() ^ mask) & 31);
#endif
}

/// Bit i is set where lane i's predicate holds.
DEEP_EP_DEVICE std::uint32_t ballot(bool predicate) {
#if DEEP_EP_TARGET_CUDA
  return __ballot_sync(0xffffffffu, predicate);
#else
  const std::byte* slots = detail::give("ballot, any or all", predicate);
  std::uint32_t bits = 0;
  for (int i = 0; i < kWarpSize; ++i) bits |= static_cast<std::uint32_t>(detail::taken<bool>(slots, i)) << i;
  return bits;
#endif
}

DEEP_EP_DEVICE bool any(bool predicate) { return ballot(predicate) != 0; }
DEEP_EP_DEVICE bool all(bool predicate) { return ballot(predicate) == 0xffffffffu; }

/// Like all(), but orders memory: every lane may rely on what any lane acquired or wrote before.
DEEP_EP_DEVICE bool agree(bool good) {
  const bool all_good = all(good);
  sync();
  return all_good;
}

/// The largest of the lanes' values, in every lane.
template <class T>
DEEP_EP_DEVICE T max(T value) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
#if DEEP_EP_TARGET_CUDA
  return __reduce_max_sync(0xffffffffu, value);
#else
  const std::byte* slots = detail::give("max", value);
  for (int i = 0; i < kWarpSize; ++i) value = value < detail::taken<T>(slots, i) ? detail::taken<T>(slots, i) : value;
  return value;
#endif
}

/// Sum over the lanes up to and including this one, on every target added in the same order.
template <class T>
DEEP_EP_DEVICE T inclusive_sum(T value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = shuffle(value, lane_index() - distance);
    if (lane_index() >= distance) value = below + value;
  }
  return value;
}

/// Bit i is set where lane i gave the same value as this lane.
DEEP_EP_DEVICE std::uint32_t match_any(std::uint32_t value) {
#if DEEP_EP_TARGET_CUDA
  return __match_any_sync(0xffffffffu, value);
#else
  const std::byte* slots = detail::give("match_any", value);
  std::uint32_t bits = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    bits |= static_cast<std::uint32_t>(detail::taken<std::uint32_t>(slots, i) == value) << i;
  }
  return bits;
#endif
}

}  // namespace deep_ep::device::warp

namespace deep_ep::device {

// Code for one thread by itself, or for the 32 lanes of a warp together, takes one of these as its Group.

/// Every call is this thread's own.
struct OneThread {
  DEEP_EP_DEVICE static bool leads() { return true; }
  DEEP_EP_DEVICE static void sync() {}
  /// Bit i: member i wants to.
  DEEP_EP_DEVICE static std::uint32_t vote(bool wanted) { return wanted ? 1 : 0; }
  DEEP_EP_DEVICE static bool any(bool predicate) { return predicate; }
  DEEP_EP_DEVICE static std::uint32_t members_before() { return 0; }  ///< as bits of a vote
  /// The leader's value, in every member.
  template <class T>
  DEEP_EP_DEVICE static T from_leader(T value) {
    return value;
  }
};

/// All 32 lanes make every call.
struct WholeWarp {
  DEEP_EP_DEVICE static bool leads() { return lane_index() == 0; }
  DEEP_EP_DEVICE static void sync() { warp::sync(); }
  DEEP_EP_DEVICE static std::uint32_t vote(bool wanted) { return warp::ballot(wanted); }
  DEEP_EP_DEVICE static bool any(bool predicate) { return warp::any(predicate); }
  DEEP_EP_DEVICE static std::uint32_t members_before() { return (1u << lane_index()) - 1; }
  template <class T>
  DEEP_EP_DEVICE static T from_leader(T value) {
    return warp::shuffle(value, 0);
  }
};

}  // namespace deep_ep::device
