// Arrival counters: words that say which rows of recv_x are there, for kernels that begin while others still arrive
// (deep_ep/arrivals.hpp has the protocol).
//
// Every warp that has a part in a row adds to the word of each of the row's places, with release at GPU scope, when its
// stores to that place are behind it. Together they add kArrivalRow. The block that knows how many rows there are adds
// what a word still lacks to kArrivalStep. Additions commute: the word passes a multiple of kArrivalStep with the last
// of them, whichever that is, and whoever acquires it then sees what all of them released.
#pragma once

#include "deep_ep/arrivals.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

struct Arrivals {
  const LowLatencyDispatchParams& params;

  static constexpr int kArrivalRow = 16;  ///< what a row adds: as many warps share it at most

  DEEP_EP_DEVICE bool wanted() const { return params.arrivals != nullptr; }

  /// By a whole warp: its part of a row is stored at `places`, lane i's at row `row` of local expert `local`.
  DEEP_EP_DEVICE void tell_stored(std::uint32_t places, int local, int row, int part) const {
    if (!wanted()) return;
    warp::sync();  // behind it, what one lane releases are the stores of all
    if ((places >> lane_index() & 1) == 0) return;
    const int parts = params.warps_per_row;
    const int share = kArrivalRow / parts;
    const int adds = part == parts - 1 ? kArrivalRow - share * part : share;
    add_release<Scope::gpu>(word(local, row >> params.arrival_shift), adds);
  }

  /// By one block, when it has written all counts and synced.
  DEEP_EP_DEVICE void tell_counts() const {
    if (!wanted()) return;
    const int words = params.arrival_words;
#pragma unroll 1
    for (int i = thread_index(); i < params.num_local_experts * words; i += block_threads()) {
      const int local = i / words;
      const std::int64_t first = std::int64_t{i % words} << params.arrival_shift;
      const std::int64_t most = std::int64_t{1} << params.arrival_shift;
      const std::int64_t left = params.recv_count[local] - first;
      const std::int64_t rows = left < 0 ? 0 : left < most ? left : most;
      add_release<Scope::gpu>(word(local, i % words), kArrivalStep - rows * kArrivalRow);
    }
  }

  /// By every warp at its end: if the call has failed, nobody may wait for the rows that will not come.
  DEEP_EP_DEVICE void tell_failure() const {
    if (!wanted() || !aborted(params.common.wait)) return;
#pragma unroll 1
    for (int i = lane_index(); i < params.num_local_experts * params.arrival_words; i += kWarpSize) {
      store_relaxed<Scope::gpu>(params.arrivals + i, kArrivalFailed);
    }
  }

 private:
  DEEP_EP_DEVICE std::int64_t* word(int local, int index) const {
    return params.arrivals + std::int64_t{local} * params.arrival_words + index;
  }
};

}  // namespace deep_ep::device::low_latency
