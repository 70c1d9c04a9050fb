// Dispatch: every token's row goes once to each rank that wants it, straight into the tensor the receiver returns.
//
// A receiver whose heap had no room for that tensor offers its bounded window instead. If that holds all rows, another
// kernel copies them behind this one (copy_received.cu). Otherwise its rows come in rounds: as many as the window
// holds, a drain by the receiver's blocks, a credit to the senders, the next ones.
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/intranode/dispatch_send.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/row_copy.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// Tells `source` where this rank wants its rows.
DEEP_EP_DEVICE void publish_targets(const DispatchParams& params, std::uint64_t epoch, int source) {
  const IntranodeParams& common = params.common;
  const RowTargets::Row rows = params.window_rows != 0
                                   ? params.window.row(params.rows, std::int64_t{source} * params.window_rows)
                                   : params.output.row(params.rows, 0);
  Mailbox<DispatchAddresses>& box = common.control.dispatch_box(common.heaps[source], common.rank);
  box.message = addresses_in(common.own_heap(), rows, params.output_rows, params.window_rows);
  store_release<Scope::system>(&box.signal, epoch);
}

DEEP_EP_DEVICE std::uint32_t rounds_for(std::int32_t rows, std::uint32_t window_rows) {
  if (window_rows == 0 || rows == 0) return 1;
  return (static_cast<std::uint32_t>(rows) + window_rows - 1) / window_rows;
}

/// Rows that `destination` gets from `source`.
DEEP_EP_DEVICE std::int32_t rows_between(const DispatchParams& params, int source, int destination) {
  return deep_ep::rows_between(params.rank_prefix_matrix, params.common.num_ranks, source, destination);
}

/// Waits for the addresses of `destination`. False after a fault.
DEEP_EP_DEVICE bool learn_target(const DispatchParams& params, std::uint64_t epoch, int destination,
                                 DispatchTarget& target) {
  const IntranodeParams& common = params.common;
  const Mailbox<DispatchAddresses>& box = common.control.dispatch_box(common.own_heap(), destination);
  const Awaited addresses{destination, Wanted::dispatch_addresses, epoch};
  if (!wait_signal(params.wait, &box.signal, addresses)) return false;
  const DispatchAddresses& told = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(params.rows, told);
  const std::uint64_t* own = &common.control.dispatch_box(common.own_heap(), common.rank).signal;
  if (!rows_of_both.agrees(params.wait, own, common.rank, addresses)) return false;
  const std::int32_t rows = rows_between(params, common.rank, destination);
  target = {.rows = targets_in(common.heaps[destination], told),
            .capacity = told.capacity,
            .window_rows = told.window_rows,
            .first_row = params.rank_prefix_matrix[common.rank * common.num_ranks + destination] - rows,
            .rounds = rounds_for(rows, told.window_rows)};
  return true;
}

/// Waits for room in the windows of the receivers that take part in `round`. False after a fault.
DEEP_EP_DEVICE bool await_credit(const DispatchParams& params, std::uint64_t epoch, std::uint32_t round,
                                 const DispatchTarget* targets) {
  const IntranodeParams& common = params.common;
  bool good = true;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (round == 0 || round >= targets[peer].rounds) continue;
    const std::uint64_t* signal = common.signal_from(peer, IntranodeSignal::dispatch_credit);
    good = wait_signal(params.wait, signal, {peer, Wanted::dispatch_credit, round_signal(epoch, round)}) && good;
  }
  bulk::fence_global();  // what was drained may be overwritten by bulk stores
  return good;
}

/// Waits until `source` has delivered its rows of `round`.
DEEP_EP_DEVICE bool await_rows(const DispatchParams& params, std::uint64_t epoch, std::uint32_t round, int source) {
  const std::uint64_t* signal = params.common.signal_from(source, IntranodeSignal::dispatch_rows);
  return wait_signal(params.wait, signal, {source, Wanted::dispatch_rows, round_signal(epoch, round + 1)});
}

/// Moves this round's rows of `source` from the window to their final places, one warp per row.
DEEP_EP_DEVICE void drain_rows(const DispatchParams& params, std::uint32_t round, int source) {
  const auto rows = static_cast<std::uint32_t>(rows_between(params, source, params.common.rank));
  const std::uint32_t begin = round * params.window_rows;
  const std::uint32_t end = begin + params.window_rows < rows ? begin + params.window_rows : rows;
  const std::int64_t first_row = params.rank_prefix_matrix[source * params.common.num_ranks + params.common.rank] -
                                 static_cast<std::int64_t>(rows);
  const RowShape& shape = params.rows;
  const auto warp = static_cast<std::uint32_t>(warp_index() * grid_blocks() + block_index());
  for (std::uint32_t index = begin + warp; index < end;
       index += static_cast<std::uint32_t>(grid_blocks() * block_warps())) {
    if (first_row + index >= params.output_rows) continue;
    const RowTargets::Row to = params.output.row(shape, first_row + index);
    const RowTargets::Row from =
        params.window.row(shape, std::int64_t{source} * params.window_rows + index % params.window_rows);
    copy_row(to.x(), from.x(), shape.row_bytes);
    copy_words(to.scales(), from.scales(), shape.scale_bytes());
    copy_words(to.topk_idx(), from.topk_idx(), shape.topk_idx_bytes());
    copy_words(to.topk_weights(), from.topk_weights(), shape.topk_weight_bytes());
    if (params.send_src_idx) copy_words(to.src_idx(), from.src_idx(), sizeof(std::int32_t));
  }
}

/// Rounds in which anybody sends us rows through the window.
DEEP_EP_DEVICE std::uint32_t rounds_to_drain(const DispatchParams& params) {
  std::uint32_t rounds = 0;
  for (int source = 0; source < params.common.num_ranks && params.window_rows != 0; ++source) {
    const std::uint32_t needed = rounds_for(rows_between(params, source, params.common.rank), params.window_rows);
    rounds = needed > rounds ? needed : rounds;
  }
  return rounds;
}

DEEP_EP_DEVICE std::uint32_t rounds_to_send(const DispatchTarget* targets, int num_ranks) {
  std::uint32_t rounds = 1;
  for (int peer = 0; peer < num_ranks; ++peer) rounds = targets[peer].rounds > rounds ? targets[peer].rounds : rounds;
  return rounds;
}

/// Sends one round; the rank's last block tells the receivers. False after a fault.
DEEP_EP_DEVICE bool send_round(const DispatchParams& params, std::uint64_t epoch, std::uint32_t round,
                               DispatchSender& sender) {
  const IntranodeParams& common = params.common;
  const DispatchShared& shared = sender.shared;
  if (round > 0 && !whole_block(await_credit(params, epoch, round, shared.targets), shared.scratch)) return false;
  sender.send(round);
  if (last_block_to_arrive(&common.state->dispatch_round_ticket, shared.scratch)) {
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->dispatch_next_token, std::uint32_t{0});
    block::sync();
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      if (round >= shared.targets[peer].rounds) continue;
      store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::dispatch_rows),
                                   round_signal(epoch, round + 1));
    }
  }
  return true;
}

/// Empties the window of one round; the rank's last block gives the senders credit for the next. False after a fault.
DEEP_EP_DEVICE bool drain_round(const DispatchParams& params, std::uint64_t epoch, std::uint32_t round,
                                std::int32_t* scratch) {
  const IntranodeParams& common = params.common;
  bool good = true;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (round >= rounds_for(rows_between(params, peer, common.rank), params.window_rows)) continue;
    good = await_rows(params, epoch, round, peer) && good;
  }
  if (!whole_block(good, scratch)) return false;
  for (int peer = 0; peer < common.num_ranks; ++peer) drain_rows(params, round, peer);
  if (last_block_to_arrive(&common.state->dispatch_drain_ticket, scratch)) {
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      // Nobody waits for credit beyond its last round, and whoever waits for nothing may already be gone.
      if (round + 1 >= rounds_for(rows_between(params, peer, common.rank), params.window_rows)) continue;
      store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::dispatch_credit),
                                   round_signal(epoch, round + 1));
    }
  }
  return true;
}

DEEP_EP_DEVICE void dispatch_body(const DispatchParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const DispatchShared shared(Carver(memory), common.num_ranks, block_warps(), params.stages, params.stage_bytes);
  // When notify found that the ranks disagree, nobody sends anything.
  const Call call = Call::begin(common.state->dispatch, params.wait, shared.scratch);
  bool good = call.begun;
  const std::int64_t received =
      good ? params.rank_prefix_matrix[(common.num_ranks - 1) * common.num_ranks + common.rank] : 0;
  if (good) {
    // 1. Say where our rows are to go. That we are here also says that nobody uses that memory any more.
    if (block_index() == 0) {
      for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
        publish_targets(params, call.epoch, peer);
      }
    }
    if (lane_index() == 0) {
      for (int stage = 0; stage < params.stages; ++stage) mbarrier::init(shared.barrier(warp_index(), stage), 1);
      mbarrier::fence_init();
    }
    if (params.fill_tail) fill_tail(params.output, params.rows, received, params.output_rows);

    // 2. Learn where the others want theirs. What is sent first comes nearer meanwhile.
    if (const int own = DispatchSender::own_token(params); own >= 0 && own < params.num_tokens && lane_index() == 0) {
      bulk::prefetch(params.x + std::int64_t{own} * params.rows.row_bytes, params.rows.row_bytes);
    }
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      good = learn_target(params, call.epoch, peer, shared.targets[peer]) && good;
    }
    bulk::fence_global();  // the addresses also say that the memory is free for our bulk stores
    good = whole_block(good, shared.scratch);

    // 3. Send. Rows for a window, ours or a peer's, take several rounds.
    DispatchSender sender{params, shared, 0};
    const std::uint32_t to_send = good ? rounds_to_send(shared.targets, common.num_ranks) : 0;
    const std::uint32_t to_drain = good ? rounds_to_drain(params) : 0;
    for (std::uint32_t round = 0; good && (round < to_send || round < to_drain); ++round) {
      if (round < to_send) good = send_round(params, call.epoch, round, sender);
      if (good && round < to_drain) good = drain_round(params, call.epoch, round, shared.scratch);
    }
  }

  // 4. The last block waits for the rows of every source.
  call.end([&] {
    if (!good) return;
    if (params.window_rows == 0) {
      for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
        await_rows(params, call.epoch, 0, peer);
      }
    }
    if (thread_index() == 0 && received > params.output_rows) {
      note_fault(params.wait, FaultKind::overflow, Wanted::dispatch_rows, common.rank, 0,
                 static_cast<std::uint64_t>(received), static_cast<std::uint64_t>(params.output_rows));
    }
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch, deep_ep::device::dispatch_body)
