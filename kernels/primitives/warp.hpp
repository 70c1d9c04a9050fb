// Operations of a whole warp. All 32 lanes must call the same function; lanes do not run in lockstep otherwise.
// Only sync() orders memory between the lanes. The others exchange values in registers and order nothing.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device::warp {

namespace detail {

template <class T>
constexpr bool exchangeable = std::is_trivially_copyable_v<T> && (sizeof(T) <= 8 || sizeof(T) == 16);

struct Add {
  template <class T>
  DEEP_EP_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a + b);
  }
};
struct Max {
  template <class T>
  DEEP_EP_HOST_DEVICE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

#if DEEP_EP_TARGET_CUDA
// Applies a 32-bit shuffle to every word of a value.
template <class T, class Shuffle>
DEEP_EP_DEVICE T by_words(T value, Shuffle shuffle) {
  static_assert(exchangeable<T>, "1 to 8 or 16 trivially copyable bytes");
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
const std::byte* give(host_machine::WarpOp op, const T& value) {
  static_assert(exchangeable<T>, "1 to 8 or 16 trivially copyable bytes");
  return host_machine::current_thread->machine->warp_exchange(op, &value, sizeof(T));
}
template <class T>
T taken(const std::byte* slots, int lane) {
  T value;
  std::memcpy(&value, slots + static_cast<std::ptrdiff_t>(lane) * host_machine::kExchangeSlot, sizeof(T));
  return value;
}
// The tree that xor-shuffles by 16, 8, 4, 2, 1 make, so that float results are those of the GPU bit by bit.
template <class T, class Op>
T reduce(host_machine::WarpOp kind, T value, Op op) {
  const std::byte* slots = give(kind, value);
  T v[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) v[i] = taken<T>(slots, i);
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v[i] = op(v[i], v[i + step]);
  }
  return v[0];
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

/// The value that lane `source_lane` (modulo 32) gave. Each lane may name a different source.
template <class T>
DEEP_EP_DEVICE T shuffle(T value, int source_lane) {
#if DEEP_EP_TARGET_CUDA
  return detail::by_words(value, [=](std::uint32_t w) { return __shfl_sync(0xffffffffu, w, source_lane); });
#else
  return detail::taken<T>(detail::give(host_machine::WarpOp::shuffle, value), source_lane & (kWarpSize - 1));
#endif
}

/// The value of the lane `distance` below; lanes below `distance` keep their own.
template <class T>
DEEP_EP_DEVICE T shuffle_up(T value, int distance) {
#if DEEP_EP_TARGET_CUDA
  return detail::by_words(value, [=](std::uint32_t w) { return __shfl_up_sync(0xffffffffu, w, distance); });
#else
  const std::byte* slots = detail::give(host_machine::WarpOp::shuffle_up, value);
  return lane_index() < distance ? value : detail::taken<T>(slots, lane_index() - distance);
#endif
}

/// The value of lane (own lane xor mask), mask 0 to 31.
template <class T>
DEEP_EP_DEVICE T shuffle_xor(T value, int mask) {
#if DEEP_EP_TARGET_CUDA
  return detail::by_words(value, [=](std::uint32_t w) { return __shfl_xor_sync(0xffffffffu, w, mask); });
#else
  return detail::taken<T>(detail::give(host_machine::WarpOp::shuffle_xor, value), (lane_index() ^ mask) & 31);
#endif
}

/// Bit i is set where lane i's predicate holds.
DEEP_EP_DEVICE std::uint32_t ballot(bool predicate) {
#if DEEP_EP_TARGET_CUDA
  return __ballot_sync(0xffffffffu, predicate);
#else
  const std::byte* slots = detail::give(host_machine::WarpOp::ballot, predicate);
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

/// Sum over the lanes, in every lane, always added in the same order.
template <class T>
DEEP_EP_DEVICE T sum(T value) {
#if DEEP_EP_TARGET_CUDA
  if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    return static_cast<T>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(value)));
  } else {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = detail::Add{}(value, shuffle_xor(value, mask));
    return value;
  }
#else
  return detail::reduce(host_machine::WarpOp::sum, value, detail::Add{});
#endif
}

/// Largest value of the lanes, in every lane.
template <class T>
DEEP_EP_DEVICE T max(T value) {
#if DEEP_EP_TARGET_CUDA
  if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    return __reduce_max_sync(0xffffffffu, value);
  } else {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = detail::Max{}(value, shuffle_xor(value, mask));
    return value;
  }
#else
  return detail::reduce(host_machine::WarpOp::max, value, detail::Max{});
#endif
}

/// Sum over the lanes up to and including this one.
template <class T>
DEEP_EP_DEVICE T inclusive_sum(T value) {
#if DEEP_EP_TARGET_CUDA
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = shuffle_up(value, distance);
    if (lane_index() >= distance) value = detail::Add{}(value, below);
  }
  return value;
#else
  const std::byte* slots = detail::give(host_machine::WarpOp::inclusive_sum, value);
  T v[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) v[i] = detail::taken<T>(slots, i);
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    for (int i = kWarpSize - 1; i >= distance; --i) v[i] = detail::Add{}(v[i], v[i - distance]);
  }
  return v[lane_index()];
#endif
}

/// Bit i is set where lane i gave the same value as this lane.
DEEP_EP_DEVICE std::uint32_t match_any(std::uint32_t value) {
#if DEEP_EP_TARGET_CUDA
  return __match_any_sync(0xffffffffu, value);
#else
  const std::byte* slots = detail::give(host_machine::WarpOp::match, value);
  std::uint32_t bits = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    bits |= static_cast<std::uint32_t>(detail::taken<std::uint32_t>(slots, i) == value) << i;
  }
  return bits;
#endif
}

}  // namespace deep_ep::device::warp
