// Passing rows through the near window: what writers and readers do with slots.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::internode {

/// The near queues of a call. In dispatch a rank has one for each other rank of its node, in combine one for each such
/// rank and each node whose tokens the rows are of. `n` numbers the rows of a queue.
struct NearQueues {
  const TransferParams& params;
  std::uint64_t call;

  DEEP_EP_DEVICE const InternodeParams& common() const { return params.common; }
  DEEP_EP_DEVICE const NearWindow& window() const { return params.near; }
  /// Of both words, when row `n` has come so far.
  DEEP_EP_DEVICE std::uint64_t progress(std::int32_t n) const { return Rings::progress(call, n + 1); }

  // As writer. `queue` is what this rank calls it, `theirs` what the reader does.

  DEEP_EP_DEVICE const std::uint64_t* emptied(int queue, std::int32_t n) const {
    return common().window.near_emptied(common().own_heap(), window().word(queue, n));
  }
  /// Row `n` may be stored; acquires.
  DEEP_EP_DEVICE bool has_room(int queue, std::int32_t n) const {
    return n < window().slots || load_acquire<Scope::system>(emptied(queue, n)) >= progress(n - window().slots);
  }
  DEEP_EP_DEVICE std::byte* slot_at(int reader, int theirs, std::int32_t n) const {
    return window().slot(theirs, n).in(common().heap_of(reader));
  }
  /// By a whole warp, which has stored row `n`.
  DEEP_EP_DEVICE void fill(int reader, int theirs, std::int32_t n) const {
    warp::sync();  // the lanes' stores come before the word
    if (lane_index() != 0) return;
    store_release<Scope::system>(common().window.near_filled(common().heap_of(reader), window().word(theirs, n)),
                                 progress(n));
  }

  // As reader.

  DEEP_EP_DEVICE const std::uint64_t* filled(int queue, std::int32_t n) const {
    return common().window.near_filled(common().own_heap(), window().word(queue, n));
  }
  /// Row `n` is there; acquires.
  DEEP_EP_DEVICE bool is_filled(int queue, std::int32_t n) const {
    return load_acquire<Scope::system>(filled(queue, n)) >= progress(n);
  }
  DEEP_EP_DEVICE std::byte* slot(int queue, std::int32_t n) const {
    return window().slot(queue, n).in(common().own_heap());
  }
  /// By one lane, when the whole warp has read row `n`.
  DEEP_EP_DEVICE void empty(int writer, int theirs, std::int32_t n) const {
    store_release<Scope::system>(common().window.near_emptied(common().heap_of(writer), window().word(theirs, n)),
                                 progress(n));
  }
};

/// By a whole warp: copies `bytes` bytes, a multiple of 16. Loads of several pieces are under way at once.
DEEP_EP_DEVICE void copy_row(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  constexpr int kTogether = 4;
  const auto* source = reinterpret_cast<const Vec16*>(from);
  auto* target = reinterpret_cast<Vec16*>(to);
  const int vectors = static_cast<int>(bytes / sizeof(Vec16));
#pragma unroll 1
  for (int begin = lane_index(); begin < vectors; begin += kTogether * kWarpSize) {
    Vec16 loaded[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      if (begin + i * kWarpSize < vectors) loaded[i] = load_weak(source + begin + i * kWarpSize);
    }
    for (int i = 0; i < kTogether; ++i) {
      if (begin + i * kWarpSize < vectors) target[begin + i * kWarpSize] = loaded[i];
    }
  }
}

}  // namespace deep_ep::device::internode
