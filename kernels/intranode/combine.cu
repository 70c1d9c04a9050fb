// Combine: for each token of this rank, the sum of the rows that its destination ranks hold.
//
// Every rank says whether the owners may read its rows where they are (pull), or pushes them into the owners' windows.
// The owner adds in rank order either way, so the result does not depend on it.
#include "kernels/intranode/combine_add.hpp"
#include "kernels/intranode/combine_push.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

using Signal = ControlWindow::Signal;

/// Words of the mailbox: where a rank's rows are, and where others may put theirs.
enum CombineWord : int {
  kPulled,
  kRows,
  kWeights,
  kWindow,
  kWindowRowBytes,
  kWindowTokens,
  kTokensPerRound,
  kNumTokens,
  kRowShape,
  kNumRows
};

/// Row size and weights must agree between the ranks.
DEEP_EP_DEVICE std::uint64_t row_shape(const CombineParams& params) {
  return static_cast<std::uint64_t>(params.row_bytes) << 32 | static_cast<std::uint64_t>(params.num_topk);
}

DEEP_EP_DEVICE void publish_rows(const CombineParams& params, std::uint64_t epoch, int peer) {
  const IntranodeParams& common = params.common;
  const std::byte* heap = common.heaps[common.rank];
  Mailbox* box = common.control.mailbox(common.heaps[peer], ControlWindow::Box::combine_addresses, common.rank);
  const std::byte* window =
      params.window + std::int64_t{peer} * params.window_tokens * static_cast<std::int64_t>(params.window_row_bytes);
  box->word[kPulled] = params.push ? 0 : 1;
  box->word[kRows] = params.push ? 0 : static_cast<std::uint64_t>(params.x - heap);
  box->word[kWeights] =
      params.push || params.topk_weights == nullptr
          ? 0
          : static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(params.topk_weights) - heap);
  box->word[kWindow] = static_cast<std::uint64_t>(window - heap);
  box->word[kWindowRowBytes] = params.window_row_bytes;
  box->word[kWindowTokens] = static_cast<std::uint64_t>(params.window_tokens);
  box->word[kTokensPerRound] = static_cast<std::uint64_t>(params.tokens_per_round);
  box->word[kNumTokens] = static_cast<std::uint64_t>(params.num_tokens);
  box->word[kRowShape] = row_shape(params);
  box->word[kNumRows] = static_cast<std::uint64_t>(params.num_rows);
  store_release<Scope::system>(&box->signal, epoch);
}

/// Waits for what `rank` says. False after a fault.
DEEP_EP_DEVICE bool learn_rows(const CombineParams& params, std::uint64_t epoch, int rank, CombinePeer& peer) {
  const IntranodeParams& common = params.common;
  const Mailbox* box = common.control.mailbox(common.heaps[common.rank], ControlWindow::Box::combine_addresses, rank);
  if (!wait_signal(params.wait, &box->signal, {rank, Wanted::combine_addresses, epoch})) return false;
  if (box->word[kRowShape] != row_shape(params)) {
    report_fault(params.wait, FaultKind::mismatch, Wanted::combine_addresses, rank, 0, row_shape(params),
                 box->word[kRowShape]);
    return false;
  }
  std::byte* heap = common.heaps[rank];
  peer.x = box->word[kPulled] != 0 ? heap + box->word[kRows] : nullptr;
  peer.topk_weights = reinterpret_cast<const float*>(heap + box->word[kWeights]);
  peer.window = heap + box->word[kWindow];
  peer.window_row_bytes = static_cast<std::uint32_t>(box->word[kWindowRowBytes]);
  peer.window_tokens = static_cast<std::int32_t>(box->word[kWindowTokens]);
  peer.tokens_per_round = static_cast<std::int32_t>(box->word[kTokensPerRound]);
  peer.num_tokens = static_cast<std::int32_t>(box->word[kNumTokens]);
  peer.num_rows = static_cast<std::int32_t>(box->word[kNumRows]);
  return true;
}

/// Does anybody push more rows into our window than it holds at once? Then peers wait for our word.
DEEP_EP_DEVICE bool needs_credit(const CombineParams& params, const CombinePeer* peers) {
  bool pushed = false;
  for (int peer = 0; peer < params.common.num_ranks; ++peer) pushed = pushed || peers[peer].x == nullptr;
  return pushed && params.num_tokens > params.window_tokens;
}

/// Some warps add, and where this rank pushes, some push and one raises flags. False after a fault.
DEEP_EP_DEVICE bool play_role(const CombineParams& params, const CombineShared& layout, std::byte* memory,
                              std::uint64_t epoch) {
  const CombinePeer* peers = layout.peers(memory);
  if (warp_index() < params.adding_warps) {
    return CombineAdder{CombineRows{params, peers, epoch}, needs_credit(params, peers)}.add_all();
  }
  const int pusher = warp_index() - params.adding_warps;
  if (pusher == layout.pushing_warps) {
    raise_flags(layout, memory);
    return true;
  }
  const int blocks = params.pushing_blocks < grid_blocks() ? params.pushing_blocks : grid_blocks();
  CombinePusher pushing{
      params,
      peers,
      epoch,
      pusher * blocks + block_index(),
      layout.pushing_warps * blocks,
      layout.cursors(memory, pusher),
      {layout.stage_barriers(memory, pusher), *layout.ring(memory, pusher), layout.first_stage(memory, pusher),
       static_cast<std::uint32_t>(layout.stages), layout.stage_bytes}};
  return block_index() < blocks ? pushing.push_all() : pushing.push_nothing();
}

DEEP_EP_DEVICE void initialise(const CombineShared& layout, std::byte* memory) {
  if (thread_index() != 0) return;
  for (int pusher = 0; pusher < layout.pushing_warps; ++pusher) {
    for (int stage = 0; stage < layout.stages; ++stage) mbarrier::init(layout.stage_barriers(memory, pusher)[stage], 1);
    PushedRing& ring = *layout.ring(memory, pusher);
    for (std::uint32_t slot = 0; slot < PushedRing::kPieces; ++slot) {
      mbarrier::init(ring.complete[slot], 1);
      mbarrier::init(ring.free[slot], 1);
    }
  }
  mbarrier::fence_init();
}

DEEP_EP_DEVICE void combine_body(const CombineParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const CombineShared layout{common.num_ranks, params.pushing_warps, params.stages, params.stage_bytes};
  std::int32_t* scratch = layout.scratch(memory);
  const std::uint64_t epoch = load_relaxed<Scope::gpu>(&common.state->combine_epoch) + 1;

  // A call that a fault called off does not count: ranks which learn of the fault at different times stay in step.
  bool good = whole_block(!aborted(params.wait), scratch);
  const bool begun = good;
  if (good) {
    // 1. Say where our rows are. That we are here also says that they are written, and that our window is free.
    if (block_index() == 0) {
      for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads())
        publish_rows(params, epoch, peer);
    }
    initialise(layout, memory);

    // 2. Learn the same of the others.
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      good = learn_rows(params, epoch, peer, layout.peers(memory)[peer]) && good;
    }
    good = whole_block(good, scratch);
  }

  // 3. Add our tokens and, where owners cannot read our rows, push them.
  if (good) good = whole_block(play_role(params, layout, memory, epoch), scratch);

  // 4. The last block tells the others that their rows have been read, waits for the same word, and ends the call.
  if (last_block_to_arrive(&common.state->combine_ticket, scratch)) {
    for (int peer = thread_index(); peer < common.num_ranks && good; peer += block_threads()) {
      store_release<Scope::system>(common.control.signal(common.heaps[peer], Signal::combine_done, common.rank), epoch);
      wait_signal(params.wait, common.control.signal(common.heaps[common.rank], Signal::combine_done, peer),
                  {peer, Wanted::combine_done, epoch});
    }
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->combine_next_part, std::uint32_t{0});
    block::sync();
    if (thread_index() == 0 && begun) store_relaxed<Scope::gpu>(&common.state->combine_epoch, epoch);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(combine, deep_ep::device::combine_body)
