// Low-latency dispatch: every token goes once to each rank that has an expert of it, and from there to the experts.
//
// One launch. Block 0 tells how many rows go where. The other blocks send one token each (or take turns); then all
// blocks receive. Nothing waits for all blocks or all ranks. A token's way, one step after the other:
//   1. Load the row and the selections of the tokens before (both at once).         HBM or L2, once
//   2. Count, cast, write the stage.                                                three block syncs
//   3. Lines to the peers, seen by the receiver's polls.                            NVLink one way (+ the wire)
//   4. Store the row to the experts.                                                HBM
// By rails (peers.hpp) a row for another node goes by its NIC to one rank there, which hands it on.
// Counts take steps 1 and 2 without the cast, then one way by cells; they are there before the first row.
//
// Calls that reach ranks by RDMA have a kernel of their own, so that the others do not carry its instructions.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/receive.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// In blocks that post to far ranks. Senders stage the row of a token once for all of them; here each warp posts the
/// rows that one rank gets over one lane, and counts them by itself.
struct DispatchPoster {
  using Call = DispatchCall<true>;
  const DispatchSender<true>& sender;
  const LowLatencyDispatchParams& params;
  Call call;
  CallPoster<Call>& poster;
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
    const Place<Cell> staged = common.staging.counts(call.epoch, peer);
    const std::uint32_t relayed = call.is_relay(peer) ? rows_to(peer) : 0;
    for (int cell = lane_index(); cell < cells; cell += kWarpSize) {
      store_cell(staged.in(common.local) + cell, sender.count_payload(peer, cell, relayed), call.epoch);
    }
    const auto bytes = static_cast<std::uint32_t>(cells) * static_cast<std::uint32_t>(sizeof(Cell));
    const Place<Cell> to = common.window.counts(call.epoch, common.rank);
    if (!poster.put(to, staged, bytes, lane_index() == 0)) return false;
    // Rows may not be staged yet. Without any, the counts go with what tells the peer of them: one doorbell.
    if (rows_to(peer) != 0) poster.flush();
    return true;
  }

  /// How many rows go to the peer, for itself or for its node.
  DEEP_EP_DEVICE std::uint32_t rows_to(int peer) const {
    if (call.is_relay(peer)) return sender.shared.relayed[call.node(peer)];
    return call.uses_rails() ? 0 : sender.routing.rows[peer];
  }

  /// Rows go in the order of their slots.
  DEEP_EP_DEVICE void post_rows() const {
    const LowLatencyParams& common = params.common;
    // Where row `slot` goes: to the rank that receives it, or by rails to the one that hands it on.
    const auto place_of = [&](int slot) {
      if (!call.uses_rails()) return common.window.row(Call::kCall, call.epoch, common.rank, slot, call.row_bytes);
      return common.staging.relayed_row(Call::kCall, call.epoch, call.own_node(), slot, call.row_bytes);
    };
    int slots = 0;
    for (int begin = 0; begin < params.num_tokens; begin += kWarpSize) {
      const int token = begin + lane_index();
      const bool mine = token < params.num_tokens && sender.routing.goes_to(token, served);
      const std::uint32_t all = warp::ballot(mine);
      const int slot = slots + count_bits(all & ((1u << lane_index()) - 1));
      const auto staged = [&] {
        return load_acquire<Scope::gpu>(call.staged_flag(common.num_ranks, mine ? token : 0)) >= call.epoch;
      };
      if (!poster.post_rows(mine, slot + 1, place_of(slot), call.staged_row(common.num_ranks, token), staged)) return;
      slots += count_bits(all);
    }
    poster.tell_rest();
  }
};

constexpr LowLatencyKind kDispatch = LowLatencyKind::dispatch;

/// By every block: what it must know before anything else. The block syncs after it.
DEEP_EP_DEVICE void prepare(const LowLatencyDispatchParams& params, const DispatchShared& shared,
                            const LowLatencyCounters& counters) {
  const LowLatencyParams& common = params.common;
  if (thread_index() == 0) {
    shared.words->epochs = counters.epochs();
    note_masks(common, shared.words->masks);
  }
  if (common.mask != nullptr) block::sync();
  const DispatchCall<false> call(common, 0, 0);
  block::each(common.num_ranks, [&](int rank) {
    shared.heaps[rank] = common.heaps[rank];
    shared.left_out[rank] = masked(common, rank) ? 1 : 0;
    if (sends(params.phase)) shared.acknowledged[rank] = call.load_acknowledged(rank);
  });
}

/// By whole blocks that post: each warp serves one rank, or one lane to it.
DEEP_EP_DEVICE void post_dispatch(DispatchSender<true>& sender) {
  const LowLatencyDispatchParams& params = sender.params;
  const DispatchShared& shared = sender.shared;
  LowLatencyCounters& counters = params.common.counters(kDispatch);
  const bool sending = sends(params.phase);
  if (sending) sender.load_counts();
  if (sending) sender.clear_counts();
  prepare(params, shared, counters);
  block::sync();
  const LowLatencyEpochs epochs = shared.words->epochs;
  if (thread_index() == 0) counters.arrive(epochs, params.phase);
  if (sending) sender.count_all();
  block::sync();
  const DispatchCall<true> call = sender.call();
  serve_lane(call, epochs.receive - 1, sending, false, shared.posters, [&](CallPoster<DispatchCall<true>>& poster) {
    DispatchPoster{sender, params, call, poster, call.receivers(poster.peer())}.post_all();
  });
}

/// kRdma: some ranks are reached by RDMA.
template <bool kRdma>
DEEP_EP_DEVICE void dispatch_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const Topology<kRdma> ranks{common};
  const auto row = params.row(ranks.uses_rails());
  const bool sending = sends(params.phase);
  const DispatchShared shared(Carver(memory), common.num_ranks, params.num_experts(), sending ? row.stage_bytes() : 0,
                              0);
  const bool tells = block_index() == 0;  // how many rows go where
  DispatchSender<kRdma> sender{params, shared, row, {params, shared.rows, shared.entries}, params.num_tokens, {},
                               -1,     -1,     1.0f};
  if constexpr (kRdma) {
    if (ranks.is_poster()) return post_dispatch(sender);
  }

  // 1. Loads under way, and which call this is.
  LowLatencyCounters& counters = common.counters(kDispatch);
  if (sending && tells) sender.load_counts();
  if (sending && !tells) sender.load(block_index() - 1, 0);
  if (sending) sender.clear_counts();
  // This warp acknowledges the call before, by relaxed stores behind this fence, which orders them after all that
  // earlier kernels have read. A release at the place of the stores would hold up the counts, by up to 1.1 us.
  const bool acknowledges = tells && warp_index() == block_warps() - 1;
  if (acknowledges) fence<Scope::system>();
  prepare(params, shared, counters);
  block::sync();
  const DispatchShared::Words& words = *shared.words;

  // 2. Send. The counts come first, as others wait for them.
  if (sending && tells) {
    sender.count_all();
    block::sync();
  }
  if (acknowledges) {  // before anything waits for room: the peer may wait for ours
    warp::each(common.num_ranks, [&](int peer) {
      if (load_relaxed<Scope::block>(&shared.left_out[peer]) != 0 || ranks.is_far(peer)) return;
      std::uint64_t* word = common.window.acknowledged(kDispatch, common.rank).in(shared.heaps[peer]);
      store_relaxed<Scope::system>(word, words.epochs.receive - 1);
    });
  }
  if (sending && tells) {
    sender.send_counts();
    block::sync();
  } else if (sending) {
    sender.send_tokens(common.working_blocks - 1);
  }
  const auto arrive = [&] {
    if (thread_index() == block_threads() - 1) counters.arrive(words.epochs, params.phase);
  };
  if (!receives(params.phase)) return arrive();

  // 3. Receive.
  const DispatchReceiver<kRdma> receiver{params, shared, row};
  const Divisor& parts = params.warps_per_row;
  int group = warp_index() / parts * common.working_blocks + block_index();
  int groups = block_warps() / parts * common.working_blocks;
  const bool last = receive_with_masks(common, kDispatch, shared.words->masks, [&](bool again) {
    if (again) {  // alone
      group = warp_index() / parts;
      groups = block_warps() / parts;
      block::each(common.num_ranks, [&](int rank) { shared.left_out[rank] = masked(common, rank) ? 1 : 0; });
      block::sync();
    }
    receiver.learn_counts({.writes = tells || again, .measures = tells && !again});
    if (!again) arrive();
    if (words.failed == 0) receiver.receive_rows(group, groups, warp_index() % parts);
    Arrivals{params}.tell_failure();
  });
  if (last && params.recv_stats != nullptr) {  // other blocks have written the counts, or this one
    block::each(params.num_local_experts,
                [&](int local) { params.recv_stats[local] += load_relaxed<Scope::gpu>(params.recv_count + local); });
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency, deep_ep::device::low_latency::dispatch_body<false>)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_rdma, deep_ep::device::low_latency::dispatch_body<true>)
