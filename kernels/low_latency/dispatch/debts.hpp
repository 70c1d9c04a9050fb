// What far ranks owe in a dispatch: see transport/news.hpp.
#pragma once

#include "kernels/low_latency/dispatch/send.hpp"

namespace deep_ep::device::low_latency {

struct DispatchDebts {
  const LowLatencyParams& common;
  std::uint64_t epoch;  ///< that is received; 0: none

  DEEP_EP_DEVICE DispatchDebts(const LowLatencyDispatchParams& params, const LowLatencyEpochs& epochs)
      : common(params.common), epoch(receives(params.phase) ? epochs.receive : 0) {}

  /// Counts, then on each lane the rows up to the last one.
  DEEP_EP_DEVICE Awaited rows_of(int peer) const {
    if (epoch == 0) return {peer, Wanted::nothing, 0};
    const LowLatencyWindow& window = common.window;
    const auto misses = [&](int lane, int place) {
      const std::uint64_t* word = window.progress(LowLatencyKind::dispatch, epoch, peer, lane).in(common.local);
      return load_acquire<Scope::system>(word) < LowLatencyMailbox::progress_value(epoch, place);
    };
    if (misses(0, 0)) return {peer, Wanted::low_latency_dispatch_counts, epoch};
    const CountHead head = CountHead::unpack(load_cell(window.counts(epoch, peer).in(common.local)).payload);
    const auto rows = static_cast<int>(head.rows);
#pragma unroll 1
    for (int lane = 0; lane < common.lanes && lane < rows; ++lane) {
      const int last = rows - 1 - (rows - 1 - lane) % common.lanes;
      if (misses(lane, last + 1)) return {peer, Wanted::low_latency_dispatch_rows, epoch};
    }
    return {peer, Wanted::nothing, 0};
  }
};

}  // namespace deep_ep::device::low_latency
