// The blocks of the low-latency dispatch that post to far ranks. Senders stage the row of a token once for all of them;
// here each warp posts the rows that one rank gets over one lane, and counts them by itself.
#pragma once

#include "kernels/low_latency/dispatch/send.hpp"
#include "kernels/low_latency/transport/poster.hpp"

namespace deep_ep::device::low_latency {

struct DispatchPoster {
  using Reach = DispatchReach<true>;
  const DispatchSender<true>& sender;
  const LowLatencyDispatchParams& params;
  Reach reach;
  CallPoster<Reach>& poster;
  RankRange served;  ///< the ranks whose rows the peer gets

  /// By one warp: posts all that the peer gets from this rank by one lane in one call.
  DEEP_EP_DEVICE void post_all() const {
    const bool counts = poster.is_first_lane();
    if (counts && !post_counts()) return;
    if (served.count != 0) post_rows();
    // The peer learns of the counts with the first rows, or here: also when the call is over for this rank, as ranks
    // that disagree find that out by each other's counts.
    if (counts && poster.progress(0)) poster.flush();
  }

 private:
  DEEP_EP_DEVICE bool post_counts() const {
    const LowLatencyParams& common = params.common;
    const int peer = poster.peer();
    const int cells = params.count_cells;
    const Place<Cell> staged = common.staging.counts(reach.epoch, peer);
    const std::uint32_t relayed = reach.has_rail_to(peer) ? rows_to(peer) : 0;
    for (int cell = lane_index(); cell < cells; cell += kWarpSize) {
      store_cell(staged.in(common.local) + cell, sender.count_payload(peer, cell, relayed), reach.epoch);
    }
    const auto bytes = static_cast<std::uint32_t>(cells) * static_cast<std::uint32_t>(sizeof(Cell));
    const Place<Cell> to = common.window.counts(reach.epoch, common.rank);
    if (!poster.put(to, staged, bytes, lane_index() == 0)) return false;
    // Rows may not be staged yet. Without any, the counts go with what tells the peer of them: one doorbell.
    if (rows_to(peer) != 0) poster.flush();
    return true;
  }

  /// How many rows go to the peer, for itself or for its node.
  DEEP_EP_DEVICE std::uint32_t rows_to(int peer) const {
    if (reach.has_rail_to(peer)) return sender.shared.relayed[reach.node_of(peer)];
    return reach.by_rails() ? 0 : sender.routing.rows[peer];
  }

  /// Rows go in the order of their slots.
  DEEP_EP_DEVICE void post_rows() const {
    const LowLatencyParams& common = params.common;
    const auto progress = [&](int place) { return poster.progress(place); };
    // Where row `slot` goes: to the rank that receives it, or by rails to the one that hands it on.
    const auto place_of = [&](int slot) {
      if (!reach.by_rails()) return common.window.row(Reach::kCall, reach.epoch, common.rank, slot, reach.row_bytes);
      return common.staging.relayed_row(Reach::kCall, reach.epoch, reach.own_node(), slot, reach.row_bytes);
    };
    int slots = 0;
    for (int begin = 0; begin < params.num_tokens; begin += kWarpSize) {
      const int token = begin + lane_index();
      const bool mine = token < params.num_tokens && sender.routing.goes_to(token, served);
      const std::uint32_t all = warp::ballot(mine);
      const int slot = slots + count_bits(all & ((1u << lane_index()) - 1));
      const bool on = poster.post_rows(
          mine && poster.takes(slot), slot + 1,
          [&] {
            const bool there = load_acquire<Scope::gpu>(reach.staged_flag(mine ? token : 0)) >= reach.epoch;
            return there ? rdma::StagedRow::staged : rdma::StagedRow::awaited;
          },
          [&](bool posts) { return poster.put(place_of(slot), reach.staged_row(token), reach.row_bytes, posts); },
          progress);
      if (!on) return;
      slots += count_bits(all);
    }
    poster.tell_rest(progress);
  }
};

/// By whole blocks.
DEEP_EP_DEVICE void post_dispatch(DispatchSender<true>& sender) {
  const LowLatencyDispatchParams& params = sender.params;
  const LowLatencyParams& common = params.common;
  const DispatchShared& shared = sender.shared;
  const Reach<true> ranks{common};
  const bool sending = sends(params.phase);

  // 1. Which call is this? What goes where?
  if (sending) sender.load_counts();
  if (sending) sender.clear_counts();
  for (int node = thread_index(); node < ranks.num_nodes(); node += block_threads()) shared.relayed[node] = 0;
  LowLatencyCounters& counters = common.counters(LowLatencyKind::dispatch);
  if (thread_index() == 0) shared.words->epochs = counters.epochs();
  block::sync();
  const LowLatencyEpochs epochs = shared.words->epochs;
  if (thread_index() == 0) counters.arrive(epochs, params.phase);
  if (sending) sender.count_all();
  if (sending && ranks.by_rails()) sender.routing.count_groups(common.rail_width, shared.relayed);
  block::sync();

  // 2. Each warp serves one rank, or one lane to it.
  const PostedLane to = ranks.posted();
  if (to.rank < 0 || warp::any(masked(common, to.rank))) return;
  const DispatchReach<true> reach = sender.reach();
  CallPoster poster(reach, to, shared.posters[warp_index()]);
  const bool told = !poster.is_first_lane() || poster.acknowledge(epochs.receive - 1);
  if (sending && told && poster.await_room()) {
    DispatchPoster{sender, params, reach, poster, ranks.served_by(to.rank)}.post_all();
  }
  poster.await_earlier();
  poster.close();
}

}  // namespace deep_ep::device::low_latency
