// Dispatch of the second interface: every token's row goes once to each other rank that has one of its experts, to the
// token's own place in that rank's window. Nobody needs to know how many rows come before they are sent.
//
// (1) Ranks meet: their windows are free. (2) A fresh dispatch tells all ranks this rank's selections. (3) Rows travel;
// meanwhile further blocks number the selections of all ranks (dispatch_number.hpp), and tell the host how many rows
// come. (4) The last block waits for the rows of all others, and reports a rank that means another call. Another kernel
// (rows/spread_rows.cu) then copies rows from their places to the results.
//
// No rank overwrites rows that this one still reads: a rank sends when it has heard that this one has begun the call,
// which this one does behind whatever it reads from its window, in stream order.
#include "kernels/common/row_comparison.hpp"
#include "kernels/elastic/dispatch_number.hpp"
#include "kernels/elastic/dispatch_send.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// What ranks must agree on before rows travel; of a fresh dispatch the rest is compared with the selections.
DEEP_EP_DEVICE DispatchAddresses announced(const ElasticDispatchParams& params) {
  DispatchAddresses told{};
  told.row_bytes = params.rows.row_bytes;
  told.num_scales = params.fresh ? params.rows.num_scales : static_cast<std::int32_t>(params.window.words_beside);
  told.num_topk = params.rows.num_topk;
  told.capacity = params.window.max_tokens;
  return told;
}

/// Tells `peer` that this rank has come, so that its window is free, and with which rows.
DEEP_EP_DEVICE void announce_dispatch(const ElasticDispatchParams& params, std::uint64_t epoch, int peer) {
  const IntranodeParams& common = params.common;
  Mailbox<DispatchAddresses>& box = common.control.dispatch_box(common.heaps[peer], common.rank);
  box.message = announced(params);
  store_release<Scope::system>(&box.signal, epoch);
}

/// Waits until `rank` has announced itself, and compares its rows with ours. False after a fault.
DEEP_EP_DEVICE bool hear_dispatch(const ElasticDispatchParams& params, std::uint64_t epoch, int rank) {
  const IntranodeParams& common = params.common;
  const Mailbox<DispatchAddresses>& box = common.control.dispatch_box(common.own_heap(), rank);
  const Awaited addresses{rank, Wanted::dispatch_addresses, epoch};
  if (!wait_signal(params.wait, &box.signal, addresses)) return false;
  const DispatchAddresses ours = announced(params), theirs = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(RowField::row_bytes, ours.row_bytes, theirs.row_bytes);
  rows_of_both.compare(RowField::num_scales, ours.num_scales, theirs.num_scales);
  rows_of_both.compare(RowField::num_topk, ours.num_topk, theirs.num_topk);
  rows_of_both.compare(RowField::max_tokens, ours.capacity, theirs.capacity);
  const std::uint64_t* own = &common.control.dispatch_box(common.own_heap(), common.rank).signal;
  return rows_of_both.agrees(params.wait, own, common.rank, addresses);
}

/// By the telling blocks: copies this rank's selections to all ranks. The last one says that they are there.
DEEP_EP_DEVICE void tell_selections(const ElasticDispatchParams& params, std::uint64_t epoch, std::int32_t* scratch) {
  constexpr int kTogether = 4;  // a vector's
  const IntranodeParams& common = params.common;
  const std::int64_t end = std::int64_t{params.num_tokens} * params.rows.num_topk;
  const int experts = params.num_local_experts * common.num_ranks;
  const std::int64_t step = std::int64_t{params.telling_blocks} * block_threads() * kTogether;
  for (std::int64_t at = (std::int64_t{block_index()} * block_threads() + thread_index()) * kTogether; at < end;
       at += step) {
    std::int64_t index[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) index[i] = at + i < end ? params.topk_idx.load_cached(at + i) : -1;
    Vec16 told;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) told.word[i] = static_cast<std::uint32_t>(expert_of(index[i], experts));
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      *reinterpret_cast<Vec16*>(params.told.of(common.heaps[peer], common.rank) + at) = told;
    }
    for (int i = 0; params.numbers.selected != nullptr && i < kTogether && at + i < end; ++i) {
      if (params.topk_idx.is_64_bit) {
        reinterpret_cast<std::int64_t*>(params.numbers.selected)[at + i] = index[i];
      } else {
        reinterpret_cast<std::int32_t*>(params.numbers.selected)[at + i] = static_cast<std::int32_t>(index[i]);
      }
    }
  }
  for (int peer = thread_index(); block_index() == 0 && peer < common.num_ranks; peer += block_threads()) {
    ToldSelections::Header& header = params.told.header(common.heaps[peer], common.rank);
    header.shape = params.call.shape;
    header.num_tokens = params.num_tokens;
  }
  if (!last_of_blocks(&common.state->telling_ticket, params.telling_blocks, scratch)) return;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::selections), epoch);
  }
}

/// By a sending block. False after a fault.
DEEP_EP_DEVICE bool send_rows(const ElasticDispatchParams& params, std::uint64_t epoch,
                              const ElasticDispatchShared& shared) {
  const IntranodeParams& common = params.common;
  const bool sends = warp_index() < params.sending_warps;
  const int first_stage = sends ? warp_index() * params.stages : 0;
  ElasticSender sender{
      params,
      {shared.barriers + first_stage, shared.stages + static_cast<std::size_t>(first_stage) * params.stage_bytes,
       static_cast<std::uint32_t>(params.stages), params.stage_bytes}};
  if (sends && lane_index() == 0) sender.pipe.init();

  // 1. Ranks meet. What is sent first comes nearer meanwhile.
  for (int peer = thread_index(); block_index() == 0 && peer < common.num_ranks; peer += block_threads()) {
    announce_dispatch(params, epoch, peer);
  }
  const std::int32_t own = ElasticSender::own_token(params);
  if (sends && own >= 0 && own < params.end_of_pass() && lane_index() == 0) {
    bulk::prefetch(params.x + std::int64_t{own} * params.rows.row_bytes, params.rows.row_bytes);
  }
  bool good = true;
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    good = hear_dispatch(params, epoch, peer) && good;
  }
  bulk::fence_global();  // windows that are free may be overwritten by bulk stores
  if (!whole_block(good, shared.scratch)) return false;

  // 2. Tell the selections.
  if (params.fresh && block_index() < params.telling_blocks) {
    tell_selections(params, epoch, shared.scratch);
    bulk::fence_global();
  }

  // 3. Send.
  if (sends) sender.send();
  if (!last_of_blocks(&common.state->dispatch_round_ticket, params.sending_blocks, shared.scratch)) return true;
  if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->dispatch_next_token, std::uint32_t{0});
  for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::dispatch_rows), round_signal(epoch, 1));
  }
  return true;
}

DEEP_EP_DEVICE void dispatch_elastic_body(const ElasticDispatchParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const ElasticDispatchShared shared(Carver(memory), params.sending_warps, params.stages, params.stage_bytes);
  const Call call = Call::begin(common.state->dispatch, params.wait, shared.scratch);
  bool good = call.begun;
  if (good && block_index() < params.sending_blocks) good = send_rows(params, call.epoch, shared);
  if (good && params.fresh && block_index() >= grid_blocks() - params.numbers.blocks) {
    const DispatchNumbersShared numbers(Carver(memory + params.numbers.shared_at), params.numbers.warps,
                                        common.num_ranks, params.num_local_experts);
    DispatchNumberer{params, numbers, call.epoch, shared.scratch}.number();
  }

  // 4. The last block waits for the rows of every source, and says if a source means another call.
  call.end([&] {
    for (int peer = thread_index(); good && peer < common.num_ranks; peer += block_threads()) {
      const bool came = wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::dispatch_rows),
                                    {peer, Wanted::dispatch_rows, round_signal(call.epoch, 1)});
      if (came && params.fresh) agrees_on_call(params.call, params.told.header(common.own_heap(), peer).shape, peer);
    }
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch_elastic, deep_ep::device::dispatch_elastic_body)
