// Dispatch: every token's row goes once to each rank that wants it, straight into the tensor the receiver returns.
//
// A receiver whose heap had no room for that tensor offers a bounded window instead. Then its rows come in rounds: as
// many as the window holds, a drain by the receiver's blocks, a credit to the senders, the next ones.
#include "kernels/common/tickets.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/intranode/dispatch_send.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

using Signal = ControlWindow::Signal;

/// Words of the mailbox in which a receiver says where it wants its rows.
enum DispatchWord : int { kX, kScales, kTopkIdx, kTopkWeights, kSrcIdx, kCapacity, kWindowRows, kRowBytes, kSidecar };

/// Row size and sidecar must agree even where no counts are exchanged (cached calls).
DEEP_EP_DEVICE std::uint64_t sidecar_word(const DispatchParams& params) {
  return static_cast<std::uint64_t>(params.num_scales) << 32 | static_cast<std::uint64_t>(params.num_topk);
}

/// Tells `source` where this rank wants its rows.
DEEP_EP_DEVICE void publish_targets(const DispatchParams& params, std::uint64_t epoch, int source) {
  const IntranodeParams& common = params.common;
  std::byte* heap = common.heaps[common.rank];
  const bool windowed = params.window_rows != 0;
  const RowTargets& rows = windowed ? params.window : params.output;
  const std::int64_t first = windowed ? std::int64_t{source} * params.window_rows : 0;
  const auto offset = [&](const void* base, std::int64_t row_bytes) {
    return base == nullptr ? 0
                           : static_cast<std::uint64_t>(static_cast<const std::byte*>(base) - heap + first * row_bytes);
  };
  Mailbox* box = common.control.mailbox(common.heaps[source], ControlWindow::Box::dispatch_addresses, common.rank);
  box->word[kX] = offset(rows.x, params.row_bytes);
  box->word[kScales] = offset(rows.scales, std::int64_t{params.num_scales} * 4);
  box->word[kTopkIdx] = offset(rows.topk_idx, std::int64_t{params.num_topk} * (params.topk_idx_is_64_bit ? 8 : 4));
  box->word[kTopkWeights] = offset(rows.topk_weights, std::int64_t{params.num_topk} * 4);
  box->word[kSrcIdx] = offset(rows.src_idx, 4);
  box->word[kCapacity] = static_cast<std::uint64_t>(params.output_rows);
  box->word[kWindowRows] = params.window_rows;
  box->word[kRowBytes] = params.row_bytes;
  box->word[kSidecar] = sidecar_word(params);
  store_release<Scope::system>(&box->signal, epoch);
}

DEEP_EP_DEVICE std::uint32_t rounds_for(std::int32_t rows, std::uint32_t window_rows) {
  if (window_rows == 0 || rows == 0) return 1;
  return (static_cast<std::uint32_t>(rows) + window_rows - 1) / window_rows;
}

/// Rows that `destination` gets from `source`.
DEEP_EP_DEVICE std::int32_t rows_between(const DispatchParams& params, int source, int destination) {
  const std::int32_t* end = params.rank_prefix_matrix + source * params.common.num_ranks + destination;
  return source == 0 ? *end : *end - *(end - params.common.num_ranks);
}

/// Waits for the addresses of `destination`. False after a fault.
DEEP_EP_DEVICE bool learn_target(const DispatchParams& params, std::uint64_t epoch, int destination,
                                 DispatchTarget& target) {
  const IntranodeParams& common = params.common;
  const Mailbox* box =
      common.control.mailbox(common.heaps[common.rank], ControlWindow::Box::dispatch_addresses, destination);
  if (!wait_signal(params.wait, &box->signal, {destination, Wanted::dispatch_addresses, epoch})) return false;
  if (box->word[kRowBytes] != params.row_bytes || box->word[kSidecar] != sidecar_word(params)) {
    const bool row = box->word[kRowBytes] != params.row_bytes;
    report_fault(params.wait, FaultKind::mismatch, Wanted::dispatch_addresses, destination, row ? 0 : 1,
                 row ? params.row_bytes : sidecar_word(params), row ? box->word[kRowBytes] : box->word[kSidecar]);
    return false;
  }
  std::byte* heap = common.heaps[destination];
  target.rows.x = heap + box->word[kX];
  target.rows.scales = heap + box->word[kScales];
  target.rows.topk_idx = heap + box->word[kTopkIdx];
  target.rows.topk_weights = reinterpret_cast<float*>(heap + box->word[kTopkWeights]);
  target.rows.src_idx = reinterpret_cast<std::int32_t*>(heap + box->word[kSrcIdx]);
  target.capacity = static_cast<std::int64_t>(box->word[kCapacity]);
  target.window_rows = static_cast<std::uint32_t>(box->word[kWindowRows]);
  const std::int32_t rows = rows_between(params, common.rank, destination);
  const std::int32_t end = params.rank_prefix_matrix[common.rank * common.num_ranks + destination];
  target.first_row = end - rows;
  target.rounds = rounds_for(rows, target.window_rows);
  return true;
}

/// Waits for room in the windows of the receivers that take part in `round`. False after a fault.
DEEP_EP_DEVICE bool await_credit(const DispatchParams& params, std::uint64_t epoch, std::uint32_t round,
                                 const DispatchTarget* targets) {
  const IntranodeParams& common = params.common;
  bool good = true;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    if (round == 0 || round >= targets[peer].rounds) continue;
    const std::uint64_t* signal = common.control.signal(common.heaps[common.rank], Signal::dispatch_credit, peer);
    good = wait_signal(params.wait, signal, {peer, Wanted::dispatch_credit, round_signal(epoch, round)}) && good;
  }
  bulk::fence_global();  // what was drained may be overwritten by bulk stores
  return good;
}

/// Waits until `source` has delivered its rows of `round`.
DEEP_EP_DEVICE bool await_rows(const DispatchParams& params, std::uint64_t epoch, std::uint32_t round, int source) {
  const IntranodeParams& common = params.common;
  const std::uint64_t* signal = common.control.signal(common.heaps[common.rank], Signal::dispatch_rows, source);
  return wait_signal(params.wait, signal, {source, Wanted::dispatch_rows, round_signal(epoch, round + 1)});
}

/// A warp copies `bytes` (multiple of 4) that a peer wrote.
DEEP_EP_DEVICE void copy_words(void* to, const void* from, std::uint32_t bytes) {
  const auto* source = static_cast<const std::uint32_t*>(from);
  auto* destination = static_cast<std::uint32_t*>(to);
  for (std::uint32_t i = static_cast<std::uint32_t>(lane_index()); i < bytes / 4; i += kWarpSize) {
    destination[i] = load_weak(source + i);
  }
}

/// Moves this round's rows of `source` from the window to their final places, a warp a row.
DEEP_EP_DEVICE void drain_rows(const DispatchParams& params, std::uint32_t round, int source) {
  const auto rows = static_cast<std::uint32_t>(rows_between(params, source, params.common.rank));
  const std::uint32_t begin = round * params.window_rows;
  const std::uint32_t end = begin + params.window_rows < rows ? begin + params.window_rows : rows;
  const std::int64_t first_row = params.rank_prefix_matrix[source * params.common.num_ranks + params.common.rank] -
                                 static_cast<std::int64_t>(rows);
  const std::uint32_t idx_bytes = static_cast<std::uint32_t>(params.num_topk) * (params.topk_idx_is_64_bit ? 8 : 4);
  const std::uint32_t weight_bytes = static_cast<std::uint32_t>(params.num_topk) * 4;
  const std::uint32_t scale_bytes = static_cast<std::uint32_t>(params.num_scales) * 4;
  const auto warp = static_cast<std::uint32_t>(warp_index() * grid_blocks() + block_index());
  for (std::uint32_t index = begin + warp; index < end;
       index += static_cast<std::uint32_t>(grid_blocks() * block_warps())) {
    const std::int64_t to = first_row + index;
    const std::int64_t from = std::int64_t{source} * params.window_rows + index % params.window_rows;
    if (to >= params.output_rows) continue;
    copy_words(params.output.x + to * params.row_bytes, params.window.x + from * params.row_bytes, params.row_bytes);
    copy_words(params.output.scales + to * scale_bytes, params.window.scales + from * scale_bytes, scale_bytes);
    if (params.num_topk != 0) {  // not params.topk_idx: a rank without tokens may give an empty tensor without address
      copy_words(params.output.topk_idx + to * idx_bytes, params.window.topk_idx + from * idx_bytes, idx_bytes);
      copy_words(params.output.topk_weights + to * params.num_topk, params.window.topk_weights + from * params.num_topk,
                 weight_bytes);
    }
    if (params.send_src_idx) copy_words(params.output.src_idx + to, params.window.src_idx + from, 4);
  }
}

/// Worst-case sizes: the rows that nobody fills have no experts.
DEEP_EP_DEVICE void fill_tail(const DispatchParams& params, std::int64_t received) {
  const std::int64_t begin = received * params.num_topk;
  const std::int64_t end = params.output_rows * params.num_topk;
  for (std::int64_t i = begin + block_index() * block_threads() + thread_index(); i < end;
       i += grid_blocks() * block_threads()) {
    if (params.topk_idx_is_64_bit) {
      reinterpret_cast<std::int64_t*>(params.output.topk_idx)[i] = -1;
    } else {
      reinterpret_cast<std::int32_t*>(params.output.topk_idx)[i] = -1;
    }
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
                               DispatchSender& sender, std::int32_t* scratch) {
  const IntranodeParams& common = params.common;
  if (round > 0 && !whole_block(await_credit(params, epoch, round, sender.targets), scratch)) return false;
  sender.send(round);
  if (last_block_to_arrive(&common.state->dispatch_round_ticket, scratch)) {
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->dispatch_next_token, std::uint32_t{0});
    block::sync();
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      if (round >= sender.targets[peer].rounds) continue;
      store_release<Scope::system>(common.control.signal(common.heaps[peer], Signal::dispatch_rows, common.rank),
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
      // Nobody waits for credit beyond its last round, and who waits for nothing may already be gone.
      if (round + 1 >= rounds_for(rows_between(params, peer, common.rank), params.window_rows)) continue;
      store_release<Scope::system>(common.control.signal(common.heaps[peer], Signal::dispatch_credit, common.rank),
                                   round_signal(epoch, round + 1));
    }
  }
  return true;
}

DEEP_EP_DEVICE void dispatch_body(const DispatchParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const DispatchShared layout{common.num_ranks, block_warps(), params.stages, params.stage_bytes};
  std::int32_t* scratch = layout.scratch(memory);
  DispatchTarget* targets = layout.targets(memory);
  const std::uint64_t epoch = load_relaxed<Scope::gpu>(&common.state->dispatch_epoch) + 1;

  // When notify found that the ranks disagree, nobody sends anything.
  // Nor does the call count, so that ranks which learn of it at different times stay in step.
  bool good = whole_block(!aborted(params.wait), scratch);
  const bool begun = good;
  const std::int64_t received =
      good ? params.rank_prefix_matrix[(common.num_ranks - 1) * common.num_ranks + common.rank] : 0;
  if (good) {
    // 1. Say where our rows shall go. That we are here also says that nobody uses that memory any more.
    if (block_index() == 0) {
      for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
        publish_targets(params, epoch, peer);
      }
    }
    if (lane_index() == 0) {
      for (int stage = 0; stage < params.stages; ++stage)
        mbarrier::init(layout.barriers(memory, warp_index())[stage], 1);
      mbarrier::fence_init();
    }
    if (params.fill_tail) fill_tail(params, received);

    // 2. Learn where the others want theirs.
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      good = learn_target(params, epoch, peer, targets[peer]) && good;
    }
    bulk::fence_global();  // the addresses also say that the memory is free for our bulk stores
    good = whole_block(good, scratch);

    // 3. Send. Rows for a window, ours or a peer's, take several rounds.
    DispatchSender sender{params, targets, layout, memory, 0};
    const std::uint32_t to_send = good ? rounds_to_send(targets, common.num_ranks) : 0;
    const std::uint32_t to_drain = good ? rounds_to_drain(params) : 0;
    for (std::uint32_t round = 0; good && (round < to_send || round < to_drain); ++round) {
      if (round < to_send) good = send_round(params, epoch, round, sender, scratch);
      if (good && round < to_drain) good = drain_round(params, epoch, round, scratch);
    }
  }

  // 4. The last block waits for the rows of every source, and ends the call.
  if (last_block_to_arrive(&common.state->dispatch_ticket, scratch)) {
    if (good && params.window_rows == 0) {
      for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
        await_rows(params, epoch, 0, peer);
      }
    }
    block::sync();
    if (thread_index() == 0) {
      if (good && received > params.output_rows) {
        note_fault(params.wait, FaultKind::overflow, Wanted::dispatch_rows, common.rank, 0,
                   static_cast<std::uint64_t>(received), static_cast<std::uint64_t>(params.output_rows));
      }
      if (begun) store_relaxed<Scope::gpu>(&common.state->dispatch_epoch, epoch);
    }
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch, deep_ep::device::dispatch_body)
