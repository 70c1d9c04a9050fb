// Combine: for each token of this rank, the sum of the rows that its destination ranks hold.
//
// Every rank says whether the owners may read its rows where they are (pull), or pushes them into the owners' windows.
// The owner adds in rank order either way, so the result does not depend on it.
#include "kernels/common/row_comparison.hpp"
#include "kernels/intranode/combine_add.hpp"
#include "kernels/intranode/combine_push.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// What the handle says of the rows between this rank and `peer`: equal at both, unless their handles are of different
/// dispatches.
struct RowsWithPeer {
  std::int32_t to_peer, from_peer;

  DEEP_EP_DEVICE RowsWithPeer(const CombineParams& params, int peer)
      : to_peer(rows_between(params.rank_prefix_matrix, params.common.num_ranks, params.common.rank, peer)),
        from_peer(rows_between(params.rank_prefix_matrix, params.common.num_ranks, peer, params.common.rank)) {}
};

/// Tells `peer` where our rows are, and where it may put its own.
DEEP_EP_DEVICE void publish_rows(const CombineParams& params, std::uint64_t epoch, int peer, const RowsWithPeer& rows) {
  const IntranodeParams& common = params.common;
  const std::byte* heap = common.own_heap();
  const auto offset = [&](const void* address) {
    return params.push || address == nullptr
               ? 0
               : static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - heap);
  };
  Mailbox<CombineAddresses>& box = common.control.combine_box(common.heaps[peer], epoch, common.rank);
  box.message = {.x = offset(params.x),
                 .topk_weights = offset(params.topk_weights),
                 .window = static_cast<std::uint64_t>(params.window.part(peer) - heap),
                 .window_stride = params.window.stride,
                 .window_tokens = params.window.tokens,
                 .tokens_per_round = params.window.tokens_per_round,
                 .num_tokens = params.num_tokens,
                 .num_rows = params.num_rows,
                 .pulled = !params.push,
                 .row_bytes = params.row_bytes,
                 .num_topk = params.num_topk,
                 .rows_to_reader = rows.to_peer,
                 .rows_from_reader = rows.from_peer};
  store_release<Scope::system>(&box.signal, epoch);
}

/// Waits for what `rank` says. False after a fault.
DEEP_EP_DEVICE bool learn_rows(const CombineParams& params, std::uint64_t epoch, int rank, const RowsWithPeer& rows,
                               CombinePeer& peer) {
  const IntranodeParams& common = params.common;
  const Mailbox<CombineAddresses>& box = common.control.combine_box(common.own_heap(), epoch, rank);
  const Awaited addresses{rank, Wanted::combine_addresses, epoch};
  if (!wait_signal(ReportLateHere{{params.wait}}, &box.signal, addresses)) return false;
  const CombineAddresses& told = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(RowField::row_bytes, params.row_bytes, told.row_bytes);
  rows_of_both.compare(RowField::num_topk, params.num_topk, told.num_topk);
  rows_of_both.compare(RowField::rows_to_peer, rows.to_peer, told.rows_from_reader);
  rows_of_both.compare(RowField::rows_from_peer, rows.from_peer, told.rows_to_reader);
  const std::uint64_t* own = &common.control.combine_box(common.own_heap(), epoch, common.rank).signal;
  if (!rows_of_both.agrees(params.wait, own, common.rank, addresses)) return false;
  std::byte* heap = common.heaps[rank];
  // Our own rows are read where they lie, also where no peer can read them: they were written before the call.
  const bool ours = rank == common.rank;
  peer = {.x = ours ? params.x : heap + told.x,
          .topk_weights = ours ? params.topk_weights : reinterpret_cast<const float*>(heap + told.topk_weights),
          .pushes = !ours && !told.pulled,
          .num_rows = told.num_rows,
          .num_tokens = told.num_tokens,
          .window = {heap + told.window, told.window_stride, told.window_tokens, told.tokens_per_round}};
  return true;
}

/// Does anybody push more rows into our window than it holds at once? Then peers wait for our word.
DEEP_EP_DEVICE bool needs_credit(const CombineParams& params, const CombinePeer* peers) {
  bool pushed = false;
  for (int peer = 0; peer < params.common.num_ranks; ++peer) pushed = pushed || peers[peer].pushes;
  return pushed && params.num_tokens > params.window.tokens;
}

/// Some warps add, and where this rank pushes, some push and one raises flags. False after a fault.
DEEP_EP_DEVICE bool play_role(const CombineParams& params, const CombineShared& shared, std::uint64_t epoch) {
  if (warp_index() < params.adding_warps) {
    return CombineAdder{CombineRows{params, shared.peers, epoch}, needs_credit(params, shared.peers)}.add_all();
  }
  const int pusher = warp_index() - params.adding_warps;
  if (pusher == shared.pushing_warps) {
    raise_flags(shared);
    return true;
  }
  const int blocks = params.pushing_blocks < grid_blocks() ? params.pushing_blocks : grid_blocks();
  CombinePusher pushing{params,
                        shared.peers,
                        epoch,
                        pusher * blocks + block_index(),
                        shared.pushing_warps * blocks,
                        shared.cursors_of(pusher),
                        {shared.barriers_of(pusher), shared.rings[pusher], shared.stages_of(pusher),
                         static_cast<std::uint32_t>(shared.num_stages), shared.stage_bytes}};
  return block_index() < blocks ? pushing.push_all() : pushing.push_nothing();
}

DEEP_EP_DEVICE void initialise(const CombineShared& shared) {
  if (thread_index() != 0) return;
  for (int pusher = 0; pusher < shared.pushing_warps; ++pusher) {
    for (int stage = 0; stage < shared.num_stages; ++stage) mbarrier::init(shared.barriers_of(pusher)[stage], 1);
    PushedRing& ring = shared.rings[pusher];
    for (std::uint32_t slot = 0; slot < PushedRing::kPieces; ++slot) {
      mbarrier::init(ring.complete[slot], 1);
      mbarrier::init(ring.free[slot], 1);
    }
  }
  mbarrier::fence_init();
}

DEEP_EP_DEVICE void combine_body(const CombineParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const CombineShared shared(Carver(memory), common.num_ranks, params.pushing_warps, params.stages, params.stage_bytes);
  // Loaded while the block finds out which call it is.
  const RowsWithPeer rows_with_first(params, thread_index() < common.num_ranks ? thread_index() : 0);
  const auto rows_with = [&](int peer) {
    return peer == thread_index() ? rows_with_first : RowsWithPeer(params, peer);
  };
  const Call call = Call::begin(common.state->combine, params.wait, shared.scratch);
  bool good = call.begun;
  if (good) {
    // 1. Say where our rows are. That we are here also says that they are written, and that our window is free.
    if (block_index() == 0) {
      for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
        publish_rows(params, call.epoch, peer, rows_with(peer));
      }
    }
    initialise(shared);

    // 2. Learn the same of the others.
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      good = learn_rows(params, call.epoch, peer, rows_with(peer), shared.peers[peer]) && good;
    }
    good = whole_block(good, shared.scratch);
  }

  // 3. Add our tokens and, where owners cannot read our rows, push them.
  if (good) good = whole_block(play_role(params, shared, call.epoch), shared.scratch);

  // 4. The last block tells the others that their rows have been read, and waits for the same word.
  call.end([&] {
    for (int peer = thread_index(); peer < common.num_ranks && good; peer += block_threads()) {
      store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::combine_done), call.epoch);
      wait_signal(ReportLateHere{{params.wait}}, common.signal_from(peer, IntranodeSignal::combine_done),
                  {peer, Wanted::combine_done, call.epoch});
    }
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->combine_next_part, std::uint32_t{0});
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(combine, deep_ep::device::combine_body)
