// Low-latency dispatch: every token goes once to each rank that has an expert of it, and from there to the experts.
//
// One launch. Block 0 is the clerk: it tells how many rows go where. The other blocks send a token each (or take
// turns); then all blocks receive. Nothing waits for all blocks or all ranks.
//
// What a token's way takes, one after the other; whatever is not listed happens meanwhile:
//   1. Load the row and the selections of the tokens before (both at once).         HBM or L2, once
//   2. Count, cast, write the stage.                                                three block syncs
//   3. Lines to the peers, seen by the receiver's polls.                            NVLink one way (+ the wire)
//   4. Store the row to the experts.                                                HBM
// By rails (rails.hpp) a row for another node goes by its NIC to one rank there, which hands it on before it receives.
// Counts take steps 1 and 2 without the cast, then one way by cells; they are there before the first row.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/post.hpp"
#include "kernels/low_latency/dispatch/receive.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// By every block: what it must know before anything else. The block syncs after it.
DEEP_EP_DEVICE void prepare(const LowLatencyDispatchParams& params, const LowLatencyDispatchShared& layout,
                            std::byte* memory) {
  const LowLatencyParams& common = params.common;
  if (thread_index() == 0) {
    const Epochs before = read_epochs(common, kDispatch);
    LowLatencyDispatchShared::Words& words = layout.words(memory);
    words.sent = before.sent;
    words.received = before.received;
    note_masks(common, words.masks);
  }
  if (common.mask != nullptr) block::sync();
#pragma unroll 1
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    layout.heaps(memory)[rank] = common.heaps[rank];
    layout.left_out(memory)[rank] = masked(common, rank) ? 1 : 0;
    if (sends(params.phase)) {
      layout.acknowledged(memory)[rank] =
          load_before_overwriting<Scope::system>(acknowledged_word(common, kDispatch, rank));
    }
  }
}

/// See masks.hpp: what this block is to receive again, alone.
template <bool kRdma>
DEEP_EP_DEVICE ReceiverRole agree_on_masks(const LowLatencyReceiver<kRdma>& receiver) {
  const LowLatencyParams& common = receiver.params.common;
  MaskWords& words = receiver.layout.words(receiver.memory).masks;
  finish_with_masks(common, counters_of(common, kDispatch), words);
  const bool again = words.last != 0 && words.again != 0;
  const ReceiverRole role{.writes = again, .adds = words.last != 0 && receiver.params.recv_stats != nullptr};
  if (!role.writes && !role.adds) return role;
#pragma unroll 1
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    receiver.layout.left_out(receiver.memory)[rank] = masked(common, rank) ? 1 : 0;
  }
  block::sync();
  return role;
}

/// By NVLink alone, or to some ranks by RDMA: kernels of their own, so that their instructions are not everybody's.
template <bool kRdma>
DEEP_EP_DEVICE void low_latency_dispatch_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const LowLatencyRow row{params.hidden, params.num_topk, is_fp8(params.format), params.weights,
                          kRdma && common.rdma.rail_width != 0};
  const bool sending = sends(params.phase);
  const int num_experts = params.num_local_experts * common.num_ranks;
  const LowLatencyDispatchShared layout{common.num_ranks, num_experts, sending ? row.stage_bytes() : 0};
  const Routing routing{params, layout.rows(memory), layout.entries(memory)};
  const bool is_clerk = block_index() == 0;
  const int senders = common.working_blocks > 1 ? common.working_blocks - 1 : 1;
  LowLatencySender<kRdma> sender{params, layout, memory, row, routing, params.num_tokens, {}, -1, -1};
  if constexpr (kRdma) {
    if (is_poster(common)) return post_dispatch(sender);
  }

  // 1. Loads under way, and which call this is.
  const int first = common.working_blocks > 1 ? block_index() - 1 : 0;
  if (sending && is_clerk) sender.load_counts();
  if (sending && !is_clerk) sender.load(first, 0);
  if (sending) sender.clear_counts();
  prepare(params, layout, memory);
  block::sync();
  const LowLatencyDispatchShared::Words& words = layout.words(memory);
  if (is_clerk) {
#pragma unroll 1
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      const bool left_out = load_relaxed<Scope::block>(&layout.left_out(memory)[peer]) != 0;
      if (!left_out && !is_far<kRdma>(common, peer)) acknowledge(common, kDispatch, peer, words.received);
    }
  }

  // 2. Send.
  if (sending && is_clerk) {
    sender.send_counts();
    block::sync();
    if (first == 0) {  // alone
      sender.load(first, 0);
      sender.clear_counts();
      block::sync();
    }
  }
  if (sending && first >= 0) sender.send_tokens(senders);
  const auto arrive = [&] {
    if (thread_index() != block_threads() - 1) return;
    arrive_at_epoch(common, kDispatch, {words.sent, words.received}, params.phase);
  };
  if (!receives(params.phase)) return arrive();

  // 3. Receive.
  const LowLatencyReceiver<kRdma> receiver{params, layout, memory, row};
  ReceiverRole role{.writes = is_clerk, .adds = is_clerk && common.mask == nullptr, .measures = is_clerk};
  const Divisor& parts = params.warps_per_row;
  int group = warp_index() / parts * common.working_blocks + block_index();
  int groups = block_warps() / parts * common.working_blocks;
#pragma unroll 1
  for (bool again = false;; again = true) {
    receiver.learn_counts(role);
    if (!again) arrive();
    if (words.failed == 0 && (!again || role.writes)) receiver.receive_rows(group, groups, warp_index() % parts);
    if (common.mask == nullptr || again) return;
    role = agree_on_masks(receiver);
    if (!role.writes && !role.adds) return;
    group = warp_index() / parts;
    groups = block_warps() / parts;
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency, deep_ep::device::low_latency_dispatch_body<false>)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_rdma, deep_ep::device::low_latency_dispatch_body<true>)
