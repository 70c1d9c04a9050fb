// Dispatch between nodes: a token crosses the network once for each node that wants it, to the rank with the sender's
// index there, which spreads it by NVLink. A row's way:
//
//   1. A sending warp takes the token and loads its row (dispatch_send.hpp).
//   2. It stores the row into its final place on each rank of this node that wants it, and, packed with all that
//      travels beside it and its final places there, into the staging ring of each other node that does
//      (dispatch_spread.hpp).
//   3. When a chunk of the staging ring is whole, a poster writes it into the landing ring of the rail (posting.hpp).
//   4. There a forwarding warp loads it and stores it into its final places (dispatch_forward.hpp).
//
// A rank whose output does not lie in the heap gets its rows by local rings instead, and its fetching warps copy them
// to their final places (dispatch_fetch.hpp).
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/row_tail.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/internode/dispatch_fetch.hpp"
#include "kernels/internode/dispatch_forward.hpp"
#include "kernels/internode/dispatch_send.hpp"
#include "kernels/internode/posting.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::internode {

/// Publishes to rank `index` of this node where this rank wants its rows.
DEEP_EP_DEVICE void publish_targets(const InternodeDispatchParams& params, std::uint64_t epoch, int index) {
  const InternodeParams& common = params.transfer.common;
  Mailbox<DispatchAddresses>& box = common.window.dispatch_box(common.heap_of(index), common.grid.index());
  const bool by_ring = params.transfer.local_warps != 0;
  const RowTargets places = by_ring ? RowTargets{} : params.output;
  const auto window_rows = static_cast<std::uint32_t>(by_ring ? int{params.transfer.local.slots} : 0);
  box.message = addresses_in(common.own_heap(), places.row(params.rows, 0), params.output_rows, window_rows);
  store_release<Scope::system>(&box.signal, epoch);
}

/// Waits for the addresses of rank `index` of this node. False after a fault.
DEEP_EP_DEVICE bool learn_target(const InternodeDispatchParams& params, std::uint64_t epoch, int index,
                                 NodeTarget& target) {
  const TransferParams& transfer = params.transfer;
  const InternodeParams& common = transfer.common;
  const Mailbox<DispatchAddresses>& box = common.window.dispatch_box(common.own_heap(), index);
  const Awaited addresses{common.grid.first_of_node() + index, Wanted::dispatch_addresses, epoch};
  if (!wait_signal(transfer.wait, &box.signal, addresses)) return false;
  const DispatchAddresses& theirs = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(params.rows, theirs);
  const std::uint64_t* own = &common.window.dispatch_box(common.own_heap(), common.grid.index()).signal;
  if (!rows_of_both.agrees(transfer.wait, own, common.grid.rank, addresses)) return false;
  target = {.rows = targets_in(common.heap_of(index), theirs),
            .capacity = theirs.capacity,
            .by_ring = theirs.window_rows != 0};
  return true;
}

/// Combine would not know where the rows are of tokens that this rank forwarded beyond its room.
DEEP_EP_DEVICE void note_lack_of_relay_rows(const TransferParams& transfer) {
  const NodeGrid& grid = transfer.common.grid;
  std::int64_t relayed = 0;
  for (int number = 0; number < grid.others(); ++number) relayed += transfer.counts.from_node[grid.other(number)];
  if (relayed <= transfer.relay_rows_room) return;
  note_fault(transfer.wait, FaultKind::overflow, Wanted::internode_rows, grid.rank, 0,
             static_cast<std::uint64_t>(relayed), static_cast<std::uint64_t>(transfer.relay_rows_room));
}

DEEP_EP_DEVICE void dispatch_body(const InternodeDispatchParams& params, std::byte* memory) {
  const TransferParams& transfer = params.transfer;
  const InternodeParams& common = transfer.common;
  const NodeGrid& grid = common.grid;
  const InternodeDispatchShared shared(Carver(memory), transfer, grid_blocks(), params.stages, params.stage_bytes);
  const Call call = Call::begin(common.state->transfer, transfer.wait, shared.scratch);
  const std::uint64_t number = call.epoch - 1;
  const auto stages = static_cast<std::uint32_t>(params.stages);
  const RowPipe pipe{shared.barriers + warp_index() * params.stages,
                     shared.stages + static_cast<std::size_t>(warp_index()) * stages * params.stage_bytes, stages,
                     params.stage_bytes};
  bool good = call.begun;
  const std::int64_t received = good ? params.rank_prefix_matrix[(grid.num_ranks - 1) * grid.num_ranks + grid.rank] : 0;
  if (good) {
    // 1. Publish where our rows are to go. That this kernel runs also says that no earlier work uses that memory.
    if (block_index() == 0) {
      for (int index = thread_index(); index < grid.width; index += block_threads()) {
        publish_targets(params, call.epoch, index);
      }
    }
    if (warp_index() < transfer.moving_warps() && lane_index() == 0) pipe.init();
    if (params.fill_tail) fill_tail(params.output, params.rows, received, params.output_rows);

    // 2. Learn where the others of this node want theirs.
    for (int index = thread_index(); index < grid.width; index += block_threads()) {
      good = learn_target(params, call.epoch, index, shared.ranks[index]) && good;
    }
    for (int index = thread_index(); transfer.local_warps != 0 && index < grid.width; index += block_threads()) {
      shared.local_rows[index] = DispatchFetcher::rows_by(params, index);
    }
    bulk::fence_global();  // the addresses also say that the memory is free for our bulk stores
    good = whole_block(good, shared.scratch);
  }

  // 3. Send, forward, fetch, post.
  if (good) {
    RowSpreader to(params, shared.ranks, number, pipe);
    const DispatchForwarder forwarder{to, shared.next + warp_index() * grid.others()};
    const int local_warp = warp_index() - transfer.moving_warps();
    const DispatchFetcher fetcher{params, number, shared.local_rows, shared.local_next + local_warp * grid.width};
    good = do_roles(
        transfer, number, shared, [&] { return DispatchSender{to}.send_all(); },
        [&](int part, int parts) { return forwarder.forward_all(part, parts); },
        [&](int part, int parts) { return fetcher.fetch_all(part, parts); });
    good = whole_block(good, shared.scratch);
  }

  // 4. The last block signals to the node, and waits until its ranks have stored all our rows.
  call.end([&] {
    if (!good) return;
    end_together(transfer, call.epoch);
    if (thread_index() != 0) return;
    if (received > params.output_rows) {
      note_fault(transfer.wait, FaultKind::overflow, Wanted::dispatch_rows, grid.rank, 0,
                 static_cast<std::uint64_t>(received), static_cast<std::uint64_t>(params.output_rows));
    } else if (params.send_src_idx) {
      note_lack_of_relay_rows(transfer);
    }
  });
}

}  // namespace deep_ep::device::internode

DEEP_EP_DEFINE_KERNEL(dispatch_and_notify_internode, deep_ep::device::internode::dispatch_body)
