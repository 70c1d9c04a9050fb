// What far ranks owe in a combine: see transport/news.hpp.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/transport/reach.hpp"

namespace deep_ep::device::low_latency {

struct CombineDebts {
  const LowLatencyCombineParams& params;
  LowLatencyEpochs epochs;  ///< 0: that part does not run

  DEEP_EP_DEVICE CombineDebts(const LowLatencyCombineParams& of, const LowLatencyEpochs& now)
      : params(of), epochs{sends(of.phase) ? now.send : 0, receives(of.phase) ? now.receive : 0} {}

  /// Its selections, as owner; then as expert side, on each lane, the row of the last token that selects one of its
  /// experts.
  DEEP_EP_DEVICE Awaited rows_of(int peer) const {
    const LowLatencyParams& common = params.common;
    const LowLatencyWindow& window = common.window;
    const auto said = [&](const Place<std::uint64_t>& place) {
      return load_acquire<Scope::system>(place.in(common.local));
    };
    constexpr LowLatencyKind kCombine = LowLatencyKind::combine;
    if (said(window.begun(kCombine, peer)) < epochs.send ||
        said(window.progress(kCombine, epochs.send, peer, 0)) >> 16 < epochs.send) {
      return {peer, Wanted::low_latency_combine_selection, epochs.send};
    }
    if (epochs.receive == 0) return {peer, Wanted::nothing, 0};
    std::uint32_t lanes = (1u << common.lanes) - 1;  // whose last token is not known
#pragma unroll 1
    for (int token = params.num_tokens - 1; token >= 0 && lanes != 0; --token) {
      const int lane = token & (common.lanes - 1);
      if ((lanes >> lane & 1u) == 0 || !has_part(peer, token)) continue;
      lanes &= ~(1u << lane);
      const std::uint64_t there = LowLatencyMailbox::progress_value(epochs.receive, token + 1);
      if (said(window.progress(kCombine, epochs.receive, peer, lane)) < there) {
        return {peer, Wanted::low_latency_combine_rows, epochs.receive};
      }
    }
    return {peer, Wanted::nothing, 0};
  }

 private:
  DEEP_EP_DEVICE bool has_part(int peer, int token) const {
    bool any = false;
    for (int k = 0; k < params.num_topk; ++k) any = any || Selections{params}.rank_of_selection(token, k) == peer;
    return any;
  }
};

}  // namespace deep_ep::device::low_latency
