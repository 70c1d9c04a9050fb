// Dispatch between nodes: a token crosses the network once for each node that wants it, to the rank with the sender's
// index there, which hands it on.
//
//   row -- NVLink --> final place on each rank of this node that wants it                  (sending warps)
//       -- staging ring -- NIC --> landing ring of the rail -- NVLink --> final places     (posting lanes, forwarding
//       warps)
//
// A rank whose output does not lie in the heap gets its rows by its near window instead.
//
// Where a row's final places are travels with it, so the relay needs no table.
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

/// Tells rank `index` of this node where this rank wants its rows.
DEEP_EP_DEVICE void publish_targets(const InternodeDispatchParams& params, std::uint64_t epoch, int index) {
  const InternodeParams& common = params.transfer.common;
  Mailbox<DispatchAddresses>& box = common.window.dispatch_box(common.heap_of(index), common.grid.index());
  const bool near = params.transfer.near_warps != 0;
  const RowTargets places = near ? RowTargets{} : params.output;
  const auto window_rows = static_cast<std::uint32_t>(near ? int{params.transfer.near.slots} : 0);
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
  const DispatchAddresses& told = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(params.rows, told);
  const std::uint64_t* own = &common.window.dispatch_box(common.own_heap(), common.grid.index()).signal;
  if (!rows_of_both.agrees(transfer.wait, own, common.grid.rank, addresses)) return false;
  const bool near = told.window_rows != 0;
  target = {.rows = targets_in(common.heap_of(index), told),
            .capacity = near ? 0 : told.capacity,
            .near_capacity = near ? told.capacity : 0};
  return true;
}

/// Combine would not know where the rows are of tokens that this rank handed on beyond its room.
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
  const int moving_warps = transfer.first_warps + transfer.second_warps;
  const InternodeDispatchShared shared(Carver(memory), grid, common.lanes, grid_blocks(), moving_warps,
                                       transfer.near_warps, params.stages, params.stage_bytes);
  const Call call = Call::begin(common.state->transfer, transfer.wait, shared.scratch);
  const std::uint64_t number = call.epoch - 1;
  const auto stages = static_cast<std::uint32_t>(params.stages);
  const RowPipe pipe{shared.barriers + warp_index() * params.stages,
                     shared.stages + static_cast<std::size_t>(warp_index()) * stages * params.stage_bytes, stages,
                     params.stage_bytes};
  bool good = call.begun;
  const std::int64_t received = good ? params.rank_prefix_matrix[(grid.num_ranks - 1) * grid.num_ranks + grid.rank] : 0;
  if (good) {
    // 1. Say where our rows are to go. That we are here also says that nobody uses that memory any more.
    if (block_index() == 0) {
      for (int index = thread_index(); index < grid.width; index += block_threads()) {
        publish_targets(params, call.epoch, index);
      }
    }
    if (warp_index() < moving_warps && lane_index() == 0) pipe.init();
    if (params.fill_tail) fill_tail(params.output, params.rows, received, params.output_rows);

    // 2. Learn where the others of this node want theirs.
    for (int index = thread_index(); index < grid.width; index += block_threads()) {
      good = learn_target(params, call.epoch, index, shared.targets[index]) && good;
    }
    for (int index = thread_index(); transfer.near_warps != 0 && index < grid.width; index += block_threads()) {
      shared.near_rows[index] = DispatchFetcher::rows_by(params, index);
    }
    bulk::fence_global();  // the addresses also say that the memory is free for our bulk stores
    good = whole_block(good, shared.scratch);
  }

  // 3. Send, forward, post.
  if (good) {
    if (warp_index() < transfer.first_warps) {
      good = DispatchSender{params, shared.targets, number, pipe, any_near(shared.targets, grid.width)}.send_all();
    } else if (warp_index() < moving_warps) {
      const int warp = (warp_index() - transfer.first_warps) * grid_blocks() + block_index();
      DispatchForwarder forwarder{params,
                                  shared.targets,
                                  number,
                                  pipe,
                                  shared.next + warp_index() * grid.others(),
                                  any_near(shared.targets, grid.width)};
      good = forwarder.forward_all(warp, transfer.second_warps * grid_blocks());
    } else if (warp_index() < moving_warps + transfer.near_warps) {
      const int near_warp = warp_index() - moving_warps;
      const DispatchFetcher fetcher{
          params, {transfer, number}, shared.near_rows, shared.near_next + near_warp * grid.width};
      good = fetcher.fetch_all(near_warp * grid_blocks() + block_index(), transfer.near_warps * grid_blocks());
    } else {
      good = post_all(transfer, number, warp_index() - moving_warps - transfer.near_warps, shared.pairs);
    }
    good = whole_block(good, shared.scratch);
  }

  // 4. The last block says so to the node, and waits until its ranks have stored all our rows.
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
