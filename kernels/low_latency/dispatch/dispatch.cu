// Low-latency dispatch: every token goes once to each rank that has an expert of it, and from there to the experts.
//
// One launch, or with a hook one for each part. Block 0 tells how many rows go where. The other blocks send one token
// each (or take turns); then all of these receive. If an SM is left, one more block acknowledges the call before.
// Blocks behind these post to far ranks. No block waits for the other blocks of its grid; a block that receives waits
// for the counts of all ranks before it takes a row. A token's way, one step after the other:
//   1. Load the row and the selections of the tokens before (both at once).         HBM or L2, once
//   2. Count, cast, write the stage.                                                three block syncs
//   3. Lines to the peers, seen by the receiver's polls.                            NVLink one way (+ the wire)
//   4. Store the row to the experts.                                                HBM
// Counts take steps 1 and 2 without the cast, then one way by cells. By NVLink they are there before the first row; a
// far rank learns of them with its first rows.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/receive.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By one warp of a block that posts: all that a far rank gets from this rank over one lane in one call. Senders stage
/// the row of a token once for all far ranks; this warp counts the rows that the peer gets by itself.
DEEP_EP_DEVICE void post_to(const DispatchSender<true>& sender, CallPoster<DispatchCall<true>>& poster) {
  const LowLatencyDispatchParams& params = sender.params;
  const LowLatencyParams& common = params.common;
  const DispatchCall<true>& call = poster.call;
  const int peer = poster.peer;

  // 1. The counts.
  if (poster.lane == 0) {
    const std::uint32_t relayed = call.is_relay(peer) ? sender.shared.relayed[call.node(peer)] : 0;
    const Place<Cell> staged = common.window.staged_counts.at(call.epoch, peer);
    warp::each(params.count_cells, [&](int cell) {
      store_cell(staged.in(common.local) + cell, sender.count_payload(peer, cell, relayed), call.epoch);
    });
    const auto bytes = static_cast<std::uint32_t>(params.count_cells * static_cast<int>(sizeof(Cell)));
    const Place<Cell> to = common.window.counts.at(call.epoch, common.rank);
    if (!poster.queue.put(to.offset, staged.offset, bytes, lane_index() == 0)) return;
    // Rows may not be staged yet. Without any, the counts go with what tells the peer of them: one doorbell.
    if ((call.uses_rails() ? relayed : sender.shared.rows[peer]) != 0) poster.queue.flush();
  }

  // 2. The rows, in the order of their slots: to the rank that receives them, or by rails those of its node to the one
  // that hands them on.
  const int first = call.uses_rails() ? call.node(peer) * common.rail_width : peer;
  const int served = call.uses_rails() ? static_cast<int>(common.rail_width) : 1;  // from that one on
  const int tokens = !call.uses_rails() || call.is_relay(peer) ? params.num_tokens : 0;
  int slots = 0;
  poster.post_rows(
      tokens, common.num_ranks, 1,
      [&](int token) {
        const bool mine = token >= 0 && sender.goes_to(token, first, served);
        const std::uint32_t all = warp::ballot(mine);
        const int slot = slots + count_bits(all & ((1u << lane_index()) - 1));
        slots += count_bits(all);
        return mine ? slot + 1 : 0;
      },
      [&](int) { return call.row_bytes; });

  // 3. The peer has learned of the counts with the first rows, or does here: also when the call is over for this rank,
  // as ranks that disagree find that out by each other's counts.
  poster.tell_rest(poster.lane == 0);
}

/// By whole blocks that post: each warp serves one rank, or one lane to it.
DEEP_EP_DEVICE void post_dispatch(DispatchSender<true>& sender) {
  const LowLatencyDispatchParams& params = sender.params;
  const bool sending = params.phase.sends;
  if (sending) sender.other = sender.load_selection(0, params.num_tokens);
  if (sending) sender.clear_counts();
  sender.shared.begin<LowLatencyKind::dispatch>(params.common, params.phase);
  if (sending) sender.count(0, params.num_tokens, sender.call().uses_rails());
  block::sync();
  serve_lane(sender.call(), sender.shared, sending,
             [&](CallPoster<DispatchCall<true>>& poster) { post_to(sender, poster); });
}

/// kRdma: some ranks are reached by RDMA: other kernels do not carry the instructions. kWeighted: rows carry the
/// weights of combine. As a run-time branch that costs dispatches of 128 tokens without weights 2 %.
template <bool kRdma, bool kWeighted>
DEEP_EP_DEVICE void dispatch_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const LowLatencyRow row = params.row(kRdma && common.rail_width != 0, kWeighted);
  const bool sending = params.phase.sends;
  const DispatchShared shared{{Carver(memory), common.num_ranks, kRdma ? block_warps() : 0},
                              params.num_experts(),
                              sending ? row.stage_bytes() : 0};
  const bool tells = block_index() == 0;  // near ranks how many rows go where
  DispatchSender<kRdma> sender{params, shared, row};

  if constexpr (kRdma) {
    if (block_index() >= common.working_blocks) return post_dispatch(sender);
  }

  // 1. Loads under way, and which call this is.
  if (sending && tells) sender.other = sender.load_selection(0, params.num_tokens);
  if (sending && !tells) sender.load(block_index() - 1, 0);
  if (sending) sender.clear_counts();
  if (sending && warp_index() == block_warps() / 2) {
    warp::each(common.num_ranks, [&](int rank) { shared.heaps[rank] = common.heaps[rank]; });
  }
  shared.begin<LowLatencyKind::dispatch>(common, params.phase);
  const CallWords& words = *shared.words;

  // 2. Send. The counts come first, as others wait for them.
  if (sending && tells) {
    sender.count(0, params.num_tokens);
    block::sync();
  }
  // The last warp acknowledges the call before: it seldom has counts to send, which its release would hold up. It does
  // so before anything waits for room, as the peer may wait for ours. If an SM is left, a block does this alone.
  const int telling_block = kRdma || grid_blocks() == common.working_blocks ? 0 : common.working_blocks;
  if (block_index() == telling_block && warp_index() == block_warps() - 1) {
    sender.call().acknowledge_all(words.epochs.receive - 1);
  }
  if (block_index() == common.working_blocks) return;
  if (sending && tells) {
    sender.send_counts();
    block::sync();
  } else if (sending) {
    sender.send_tokens(common.working_blocks - 1);
  }
  if (!params.phase.receives) return;

  // 3. Receive.
  const Divisor& parts = params.warps_per_row;
  const bool last = receive_with_masks<!kWeighted>(common, LowLatencyKind::dispatch, *shared.words, [&](bool again) {
    const DispatchReceiver<kRdma> receiver{params, shared, row, tells || again, words.epochs.receive};
    const int blocks = again ? 1 : common.working_blocks;
    const int group = warp_index() / parts * blocks + (again ? 0 : block_index());
    if (receiver.learn_counts()) receiver.receive_rows(group, block_warps() / parts * blocks, warp_index() % parts);
    receiver.tell_failure();
  });
  // Where ranks may be masked, the last block knows the counts.
  if (params.recv_stats != nullptr && (common.mask == nullptr ? tells : last)) {
    block::each(params.num_local_experts,
                [&](int local) { params.recv_stats[local] += load_relaxed<Scope::gpu>(params.recv_count + local); });
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency, (deep_ep::device::low_latency::dispatch_body<false, false>))
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_weighted, (deep_ep::device::low_latency::dispatch_body<false, true>))
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_rdma, (deep_ep::device::low_latency::dispatch_body<true, false>))
