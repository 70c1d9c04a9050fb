// The near window: the last part of a rank's window, by which rows pass between ranks of one node where the others
// cannot reach them, because the heap had no room for them.
//
//   dispatch   a rank of the node: its own tokens, and those it relays --> slots of the receiver --> its output
//   combine    a rank's rows --> slots of whoever adds them, for its own tokens or as a relay
//
// A queue has one writer and one reader. Its rows are numbered; row n passes through slot n % slots.
//
//   writer                                  reader
//   (row n - slots has been taken)
//   stores row n, raises filled[slot]       takes row n, raises emptied[slot] in the writer's heap
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/limits.hpp"
#include "kernels/common/place.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

struct NearWindow {
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20;
  static constexpr int kSlotsOfRank = 32;  ///< at most, for each rank of the buffer: each slot has its words

  std::size_t begin = 0;  ///< offset in the heap
  std::uint32_t slot_bytes = 0;
  Divisor slots = 0;  ///< of a queue; 0: there is no room for one in each

  /// How much of a window of `window_bytes` it takes. Calls divide the rest differently, so it stays where it is.
  static std::size_t bytes_of(std::size_t window_bytes) {
    const std::size_t bytes = window_bytes / 4 < kMostBytes ? window_bytes / 4 : kMostBytes;
    return bytes / kLine * kLine;
  }
  /// `bytes` bytes for `queues` queues, among `num_ranks` ranks.
  static NearWindow make(std::size_t begin, std::size_t bytes, int queues, int num_ranks, std::uint32_t slot_bytes) {
    const std::size_t fit = bytes / slot_bytes / static_cast<std::size_t>(queues);
    const std::size_t most = static_cast<std::size_t>(num_ranks) * kSlotsOfRank / static_cast<std::size_t>(queues);
    return {begin, slot_bytes, static_cast<int>(fit < most ? fit : most)};
  }

  DEEP_EP_HOST_DEVICE int word(int queue, std::int32_t n) const { return queue * slots + n % slots; }
  DEEP_EP_HOST_DEVICE Place<std::byte> slot(int queue, std::int32_t n) const {
    return {begin + static_cast<std::size_t>(word(queue, n)) * slot_bytes};
  }
};

}  // namespace deep_ep
