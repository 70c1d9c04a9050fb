// Dispatch of the second interface: every token's row goes once to each other rank that has one of its experts, to the
// token's own place in that rank's window. Nobody needs to know how many rows come before they are sent.
//
// (1) Ranks meet: their windows are free. (2) A fresh dispatch tells all ranks this rank's selections. (3) Rows travel;
// meanwhile further blocks number the selections of all ranks (dispatch_number.hpp), and tell the host how many rows
// come. (4) The last block waits for the rows of all others, and reports a rank that means another call. Another kernel
// (rows/spread_rows.cu) then copies rows from their places to the results.
//
// Of a few tokens each step is one latency, so none waits for what it does not need: first rows come to shared memory
// while ranks meet, ranks meet by cells, and the last block waits for rows while the others end.
//
// No rank overwrites rows that this one still reads: a rank sends when it has heard that this one has begun the call,
// which this one does behind whatever it reads from its window, in stream order.
#include "kernels/common/row_comparison.hpp"
#include "kernels/elastic/dispatch_number.hpp"
#include "kernels/elastic/dispatch_send.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// What this rank says when it has come. A call that is meant differently otherwise is found out with the selections.
DEEP_EP_DEVICE Arrival arrival(const ElasticDispatchParams& params) {
  return {.row_bytes = params.rows.row_bytes,
          .num_scales = params.fresh ? static_cast<std::uint32_t>(params.rows.num_scales) : params.window.words_beside,
          .num_topk = static_cast<std::uint32_t>(params.rows.num_topk),
          .max_tokens = static_cast<std::uint32_t>(params.window.max_tokens)};
}

/// By the telling blocks: copies this rank's selections to all ranks. The last one says that they are there.
DEEP_EP_DEVICE void tell_selections(const ElasticDispatchParams& params, std::uint64_t epoch, std::int32_t* scratch) {
  constexpr int kTogether = 4;  // a vector's
  const IntranodeParams& common = params.common;
  const std::int64_t end = std::int64_t{params.num_tokens} * params.rows.num_topk;
  const int experts = params.num_local_experts * common.num_ranks;
  const std::int64_t step = std::int64_t{params.telling_blocks} * block_threads() * kTogether;
#pragma unroll 1
  for (std::int64_t at = (std::int64_t{block_index()} * block_threads() + thread_index()) * kTogether; at < end;
       at += step) {
    std::int64_t index[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) index[i] = at + i < end ? params.topk_idx.load_cached(at + i) : -1;
    Vec16 told;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) told.word[i] = static_cast<std::uint32_t>(expert_of(index[i], experts));
#pragma unroll 1
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
  block::each(block_index() == 0 ? common.num_ranks : 0, [&](int peer) {
    static_cast<CallShape&>(params.told.shape(common.heaps[peer], common.rank)) = params.call.shape;
  });
  if (params.telling_blocks > 1) {
    if (!last_of_blocks(&common.state->telling_ticket, params.telling_blocks, scratch)) return;
  } else {
    block::sync();
  }
  block::each(common.num_ranks, [&](int peer) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::selections),
                                 Progress::at(epoch, static_cast<std::uint32_t>(params.num_tokens)));
  });
}

/// By a block that tells or sends, whose warps have their first rows at hand. False after a fault.
DEEP_EP_DEVICE bool meet_and_send(const ElasticDispatchParams& params, std::uint64_t epoch, ElasticSender& sender,
                                  std::int32_t* scratch) {
  const IntranodeParams& common = params.common;
  // 1. Ranks meet.
  const Meeting<ReportLate> meeting = dispatch_meeting(params, epoch);
  const Arrival ours = arrival(params);
  if (block_index() == 0) meeting.announce(ours);
  const bool good = meeting.hear_all(ours);
  bulk::fence_global();  // windows that are free may be overwritten by bulk stores
  if (!whole_block(good, scratch)) return false;

  // 2. Tell the selections.
  if (params.fresh && block_index() < params.telling_blocks) {
    tell_selections(params, epoch, scratch);
    bulk::fence_global();
  }
  if (block_index() < params.first_sender) return true;

  // 3. Send.
  sender.send();
  if (!last_of_blocks(&common.state->dispatch_round_ticket, params.sending_blocks, scratch)) return true;
  block::each(common.num_ranks, [&](int peer) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::dispatch_rows), round_signal(epoch, 1));
  });
  if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->dispatch_next_token, std::uint32_t{0});
  return true;
}

/// By every block at its end. The last one of the grid waits for the others and, if its own work is `good`, for the
/// rows of every source. Then it reports a source that means another call, unless all are known to `agree`.
DEEP_EP_DEVICE void end_dispatch(const ElasticDispatchParams& params, const Call& call, bool good, bool agree) {
  const IntranodeParams& common = params.common;
  const int others = grid_blocks() - 1;
  block::sync();
  if (block_index() != others) {
    if (thread_index() == 0) add_release<Scope::gpu>(&call.counter.arrived, std::uint32_t{1});
    return;
  }
  block::each(good ? common.num_ranks : 0, [&](int peer) {
    wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::dispatch_rows),
                {peer, Wanted::dispatch_rows, round_signal(call.epoch, 1)});
  });
  if (thread_index() == 0) {
    const auto arrived = [&](const Poll&) {
      return load_acquire<Scope::gpu>(&call.counter.arrived) == static_cast<std::uint32_t>(others);
    };
    poll_until(arrived, [](const Poll&) { return false; });  // they have deadlines of their own
    store_relaxed<Scope::gpu>(&call.counter.arrived, std::uint32_t{0});
  }
  if (!agree) {
    block::sync();  // every block has begun: see agrees_on_call
    block::each(common.num_ranks,
                [&](int peer) { agrees_on_call(params.call, params.told.shape(common.own_heap(), peer), peer); });
  }
  if (thread_index() == 0 && call.begun) call.counter.count(call.epoch);
}

DEEP_EP_DEVICE void dispatch_elastic_body(const ElasticDispatchParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const ElasticDispatchShared shared(Carver(memory), params.sending_warps, params.stages, params.stage_bytes);
  const int first_stage = warp_index() < params.sending_warps ? warp_index() * params.stages : 0;
  ElasticSender sender{
      params,
      {shared.barriers + first_stage, shared.stages + static_cast<std::size_t>(first_stage) * params.stage_bytes,
       static_cast<std::uint32_t>(params.stages), params.stage_bytes}};
  const std::uint64_t epoch = common.state->dispatch.epoch();
  const bool may_begin = !aborted(params.wait);
  sender.prepare();
  const Call call{common.state->dispatch, shared.scratch, epoch, whole_block(may_begin, shared.scratch)};

  bool good = call.begun, agree = true;
  if (good && block_index() < params.first_sender + params.sending_blocks) {
    good = meet_and_send(params, epoch, sender, shared.scratch);
  }
  sender.pipe.drop();  // what is prepared and not sent
  if (good && params.fresh && block_index() >= grid_blocks() - params.numbers.blocks) {
    const NumberingShared numbers(Carver(memory + params.numbers.shared_at), params.numbers.warps,
                                  DispatchNumbers::columns(common.num_ranks, params.num_local_experts),
                                  params.num_local_experts, common.num_ranks, params.numbers.staged);
    agree = DispatchNumberer{params, numbers, epoch, shared.scratch}.number();
  }
  end_dispatch(params, call, good, agree);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch_elastic, deep_ep::device::dispatch_elastic_body)
