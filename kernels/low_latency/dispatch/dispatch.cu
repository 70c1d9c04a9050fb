// Low-latency dispatch: every token goes once to each rank that has an expert of it, and from there to the experts.
//
// One launch. Block 0 is the clerk: it tells how many rows go where. The other blocks send one token each (or take
// turns); then all blocks receive. Nothing waits for all blocks or all ranks.
//
// What a token's way takes, one step after the other; whatever is not listed happens meanwhile:
//   1. Load the row and the selections of the tokens before (both at once).         HBM or L2, once
//   2. Count, cast, write the stage.                                                three block syncs
//   3. Lines to the peers, seen by the receiver's polls.                            NVLink one way (+ the wire)
//   4. Store the row to the experts.                                                HBM
// By rails (rdma/reach.hpp) a row for another node goes by its NIC to one rank there, which hands it on before it
// receives. Counts take steps 1 and 2 without the cast, then one way by cells; they are there before the first row.
//
// Calls that reach ranks by RDMA have a kernel of their own, so that the others do not carry its instructions.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/post.hpp"
#include "kernels/low_latency/dispatch/receive.hpp"
#include "kernels/low_latency/dispatch/relay.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

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
  const CallReach<kDispatch, false, false> reach(common, 0, 0);
#pragma unroll 1
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    shared.heaps[rank] = common.heaps[rank];
    shared.left_out[rank] = masked(common, rank) ? 1 : 0;
    if (sends(params.phase)) shared.acknowledged[rank] = reach.load_acknowledged(rank);
  }
}

/// By every warp: all rows, where it is `part` of the `group`-th of `groups` groups. By rails first those of its own
/// node; then, when this rank has handed on what it has to, those that others hand on to it.
template <bool kRdma>
DEEP_EP_DEVICE void receive_rows(const DispatchReceiver<kRdma>& receiver, int group, int groups, int part) {
  const LowLatencyParams& common = receiver.params.common;
  const DispatchReach<kRdma> reach = receiver.reach();
  const int turns = reach.by_rails() ? 2 : 1;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if constexpr (kRdma) {
      if (turn == 1) {
        DispatchRelay{receiver.params, receiver.shared, receiver.row, reach}.relay_rows(group, groups, part);
      }
    }
    const Divisor& sources = turns == 1 ? common.num_ranks : turn == 0 ? common.rail_width : common.other_nodes_ranks;
    const int first = turns == 1 ? 0 : (reach.own_node() + turn) * common.rail_width;
    receiver.receive_rows_of(first, sources, group, groups, part);
  }
}

/// See masks.hpp: what this block is to receive again, alone.
template <bool kRdma>
DEEP_EP_DEVICE ReceiverRole agree_on_masks(const DispatchReceiver<kRdma>& receiver) {
  const LowLatencyParams& common = receiver.params.common;
  MaskWords& words = receiver.shared.words->masks;
  finish_with_masks(common, kDispatch, words);
  const bool again = words.last != 0 && words.again != 0;
  const ReceiverRole role{.writes = again, .adds = words.last != 0 && receiver.params.recv_stats != nullptr};
  if (!role.writes && !role.adds) return role;
#pragma unroll 1
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    receiver.shared.left_out[rank] = masked(common, rank) ? 1 : 0;
  }
  block::sync();
  return role;
}

/// kRdma: some ranks are reached by RDMA.
template <bool kRdma>
DEEP_EP_DEVICE void dispatch_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const Reach<kRdma> ranks{common};
  const auto row = params.row(ranks.by_rails());
  const bool sending = sends(params.phase);
  const int num_experts = params.num_local_experts * common.num_ranks;
  const DispatchShared shared(Carver(memory), common.num_ranks, num_experts, sending ? row.stage_bytes() : 0, 0);
  const bool is_clerk = block_index() == 0;
  const int senders = common.working_blocks > 1 ? common.working_blocks - 1 : 1;
  DispatchSender<kRdma> sender{
      params, shared, row, {params, shared.rows, shared.entries}, params.num_tokens, {}, -1, -1, 1.0f};
  if constexpr (kRdma) {
    if (ranks.posts()) return post_dispatch(sender);
  }

  // 1. Loads under way, and which call this is.
  LowLatencyCounters& counters = common.counters(kDispatch);
  const int first = common.working_blocks > 1 ? block_index() - 1 : 0;
  if (sending && is_clerk) sender.load_counts();
  if (sending && !is_clerk) sender.load(first, 0);
  if (sending) sender.clear_counts();
  // This warp acknowledges the call before, by relaxed stores behind this fence: it orders them after all that earlier
  // kernels have read. A release at the place of the stores would wait for the counts that are under way by then, 1.1
  // us of a call with few tokens.
  const bool acknowledges = is_clerk && warp_index() == block_warps() - 1;
  if (acknowledges) fence<Scope::system>();
  prepare(params, shared, counters);
  block::sync();
  const DispatchShared::Words& words = *shared.words;
  const auto acknowledge = [&] {
    if (!acknowledges) return;
#pragma unroll 1
    for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
      if (load_relaxed<Scope::block>(&shared.left_out[peer]) != 0 || ranks.is_far(peer)) continue;
      std::uint64_t* word = common.window.acknowledged(kDispatch, common.rank).in(common.heaps[peer]);
      store_relaxed<Scope::system>(word, words.epochs.receive - 1);
    }
  };
  if (!sending && is_clerk) acknowledge();

  // 2. Send.
  if (sending && is_clerk) {
    sender.send_counts(acknowledge);
    block::sync();
    if (first == 0) {  // alone
      sender.load(first, 0);
      sender.clear_counts();
      block::sync();
    }
  }
  if (sending && first >= 0) sender.send_tokens(senders);
  const auto arrive = [&] {
    if (thread_index() == block_threads() - 1) counters.arrive(words.epochs, params.phase);
  };
  if (!receives(params.phase)) return arrive();

  // 3. Receive.
  const DispatchReceiver<kRdma> receiver{params, shared, row};
  ReceiverRole role{.writes = is_clerk, .adds = is_clerk && common.mask == nullptr, .measures = is_clerk};
  const Divisor& parts = params.warps_per_row;
  int group = warp_index() / parts * common.working_blocks + block_index();
  int groups = block_warps() / parts * common.working_blocks;
#pragma unroll 1
  for (bool again = false;; again = true) {
    receiver.learn_counts(role);
    if (!again) arrive();
    if (words.failed == 0 && (!again || role.writes)) receive_rows(receiver, group, groups, warp_index() % parts);
    Arrivals{params}.tell_failure();
    if (common.mask == nullptr || again) return;
    role = agree_on_masks(receiver);
    if (!role.writes && !role.adds) return;
    group = warp_index() / parts;
    groups = block_warps() / parts;
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency, deep_ep::device::low_latency::dispatch_body<false>)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_rdma, deep_ep::device::low_latency::dispatch_body<true>)
