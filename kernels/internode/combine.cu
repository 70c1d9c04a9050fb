// Combine between nodes: for each token of this rank, the sum of the rows that its destination ranks hold. The way of a
// token's rows:
//
//   1. In each other node, a relaying warp of our rail adds up the rows of its node's ranks, which it reads in their
//      heaps, and stages the sum (combine_relay.hpp).
//   2. When a chunk of the staging ring is whole, a poster writes it into our landing ring (posting.hpp).
//   3. An adding warp adds the rows of this node's ranks and the sums that have landed (combine_add.hpp).
//
// A rank whose rows lie outside the heap pushes them through local rings to the ranks of its node that add them
// (combine_push.hpp). Chunks go the other way than in dispatch: counts of rows are swapped.
#include "kernels/common/row_comparison.hpp"
#include "kernels/internode/combine_add.hpp"
#include "kernels/internode/combine_push.hpp"
#include "kernels/internode/combine_relay.hpp"
#include "kernels/internode/posting.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::internode {

/// The rows from `source` to `destination`, as the handle has them: equal at both, unless their handles differ.
DEEP_EP_DEVICE std::int32_t rows_between(const InternodeCombineParams& params, int source, int destination) {
  return deep_ep::rows_between(params.rank_prefix_matrix, params.transfer.common.grid.num_ranks, source, destination);
}

/// Publishes to rank `index` of this node where our rows are.
DEEP_EP_DEVICE void publish_rows(const InternodeCombineParams& params, std::uint64_t epoch, int index) {
  const InternodeParams& common = params.transfer.common;
  const auto offset = [&](const void* address) {
    return address == nullptr ? 0
                              : static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - common.own_heap());
  };
  const bool pushed = params.transfer.local_warps != 0;
  Mailbox<CombineAddresses>& box = common.window.combine_box(common.heap_of(index), common.grid.index());
  box.message = {.x = pushed ? 0 : offset(params.x),
                 .topk_weights = pushed ? 0 : offset(params.topk_weights),
                 .window = 0,  // that of other ranks is somewhere else
                 .window_stride = 0,
                 .window_tokens = 0,
                 .tokens_per_round = 0,
                 .num_tokens = 0,
                 .num_rows = params.num_rows,
                 .pulled = !pushed,
                 .row_bytes = params.row_bytes,
                 .num_topk = params.num_topk,
                 .rows_to_reader = rows_between(params, common.grid.rank, common.grid.first_of_node() + index),
                 .rows_from_reader = rows_between(params, common.grid.first_of_node() + index, common.grid.rank)};
  store_release<Scope::system>(&box.signal, epoch);
}

/// Waits for what rank `index` of this node publishes. False after a fault.
DEEP_EP_DEVICE bool learn_rows(const InternodeCombineParams& params, std::uint64_t epoch, int index, NodeRows& rank) {
  const TransferParams& transfer = params.transfer;
  const InternodeParams& common = transfer.common;
  const Mailbox<CombineAddresses>& box = common.window.combine_box(common.own_heap(), index);
  const Awaited addresses{common.grid.first_of_node() + index, Wanted::combine_addresses, epoch};
  if (!wait_signal(transfer.wait, &box.signal, addresses)) return false;
  const CombineAddresses& theirs = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(RowField::row_bytes, params.row_bytes, theirs.row_bytes);
  rows_of_both.compare(RowField::num_topk, params.num_topk, theirs.num_topk);
  rows_of_both.compare(RowField::rows_to_peer, rows_between(params, common.grid.rank, addresses.peer),
                       theirs.rows_from_reader);
  rows_of_both.compare(RowField::rows_from_peer, rows_between(params, addresses.peer, common.grid.rank),
                       theirs.rows_to_reader);
  const std::uint64_t* own = &common.window.combine_box(common.own_heap(), common.grid.index()).signal;
  if (!rows_of_both.agrees(transfer.wait, own, common.grid.rank, addresses)) return false;
  const std::byte* heap = common.heap_of(index);
  rank = {.x = heap + theirs.x,
          .topk_weights = reinterpret_cast<const float*>(heap + theirs.topk_weights),
          .num_rows = theirs.num_rows,
          .pushed = !theirs.pulled};
  return true;
}

DEEP_EP_DEVICE void combine_body(const InternodeCombineParams& params, std::byte* memory) {
  const TransferParams& transfer = params.transfer;
  const InternodeParams& common = transfer.common;
  const NodeGrid& grid = common.grid;
  const InternodeCombineShared shared(Carver(memory), transfer, grid_blocks());
  const Call call = Call::begin(common.state->transfer, transfer.wait, shared.scratch);
  const std::uint64_t number = call.epoch - 1;
  const int local_warp = warp_index() - transfer.moving_warps();
  const CombinePusher pusher{params, number, shared.local_rows, shared.local_next + local_warp * grid.num_ranks};
  bool good = call.begun;
  if (good) {
    // 1. Publish where our rows are. That this kernel runs also says that they are written.
    if (block_index() == 0) {
      for (int index = thread_index(); index < grid.width; index += block_threads()) {
        publish_rows(params, call.epoch, index);
      }
    }
    // 2. Learn the same of the others of this node.
    for (int index = thread_index(); index < grid.width; index += block_threads()) {
      good = learn_rows(params, call.epoch, index, shared.ranks[index]) && good;
    }
    for (int ring = thread_index(); transfer.local_warps != 0 && ring < grid.num_ranks; ring += block_threads()) {
      shared.local_rows[ring] = pusher.rows_of(ring);
    }
    good = whole_block(good, shared.scratch);
  }

  // 3. Add for ourselves, add for our rails, push, post.
  if (good) {
    const LocalRows local(params, shared.ranks, number);
    const CombineRelay relay{local, shared.next + warp_index() * grid.others()};
    good = do_roles(
        transfer, number, shared, [&] { return CombineAdder{local}.add_all(); },
        [&](int part, int parts) { return relay.stage_all(part, parts); },
        [&](int part, int parts) { return pusher.push_all(part, parts); });
    good = whole_block(good, shared.scratch);
  }

  // 4. The last block signals to the node that its rows have been read, and waits for the same signal.
  call.end([&] {
    if (good) end_together(transfer, call.epoch);
  });
}

}  // namespace deep_ep::device::internode

DEEP_EP_DEFINE_KERNEL(combine_and_notify_internode, deep_ep::device::internode::combine_body)
