// Dispatch of the second interface: every token's row goes once to each other rank that has one of its experts, to the
// token's own place in that rank's window. Nobody needs to know how many rows come before they are sent.
//
// (1) Ranks meet: their windows are free. (2) A fresh dispatch tells all ranks this rank's selections. (3) Rows travel;
// meanwhile further blocks number the selections of all ranks (dispatch_number.hpp), and tell the host how many rows
// come. (4) The last block waits for the rows of all others, and reports a rank that means another call. Another kernel
// (rows/spread_rows.cu) then copies rows from their places to the results.
//
// Of a few tokens each step is one latency, so none waits for what it does not need: first rows come to shared memory
// while ranks meet, ranks meet by cells, few selections are told before ranks have met, and the last block waits for
// rows and for no other block.
//
// No rank overwrites rows that this one still reads: a rank sends when it has heard that this one has begun the call,
// which this one does behind whatever it reads from its window, in stream order.
#include "kernels/common/row_comparison.hpp"
#include "kernels/elastic/dispatch_number.hpp"
#include "kernels/elastic/dispatch_send.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// What this rank says when it has come. A fresh call that is meant differently otherwise is found out with the
/// selections, which a call with a handle does not tell. See RowField.
DEEP_EP_DEVICE Arrival arrival(const ElasticDispatchParams& params) {
  const RowShape& rows = params.rows;
  const int scales = params.fresh ? rows.num_scales : static_cast<int>(params.window.words_beside);
  return {{static_cast<std::int32_t>(rows.row_bytes), scales, rows.num_topk, params.window.max_tokens,
           params.fresh ? 0 : 1}};
}

/// By the first block: copies this rank's selections to all ranks, and says that they are there.
DEEP_EP_DEVICE void tell_selections(const ElasticDispatchParams& params, std::uint64_t epoch) {
  constexpr int kTogether = 4;  // a vector's
  const IntranodeParams& common = params.common;
  const std::int64_t end = std::int64_t{params.num_tokens} * params.rows.num_topk;
  const int experts = params.num_local_experts * common.num_ranks;
#pragma unroll 1
  for (std::int64_t at = thread_index() * kTogether; at < end; at += block_threads() * kTogether) {
    std::int64_t index[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) index[i] = at + i < end ? params.topk_idx.load_cached(at + i) : -1;
    Vec16 told;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) told.word[i] = static_cast<std::uint32_t>(expert_of(index[i], experts));
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      *reinterpret_cast<Vec16*>(params.told.of(common.heaps[peer], common.rank, epoch) + at) = told;
    }
    for (int i = 0; params.numbers.selected != nullptr && i < kTogether && at + i < end; ++i) {
      store_topk_index(params.numbers.selected, params.topk_idx.is_64_bit, at + i, index[i]);
    }
  }
  block::each(common.num_ranks, [&](int peer) {
    params.told.shape(common.heaps[peer], common.rank, epoch) = {params.shape, params.num_tokens};
  });
  block::sync();
  block::each(common.num_ranks, [&](int peer) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::selections), epoch);
  });
}

/// By a block that tells or sends, whose warps have their first rows at hand. False after a fault.
DEEP_EP_DEVICE bool meet_and_send(const ElasticDispatchParams& params, std::uint64_t epoch, ElasticSender& sender) {
  const IntranodeParams& common = params.common;
  // 1. Ranks meet. 2. Tell the selections: before, if their place is free anyway. One place in the code tells.
  const Meeting meeting = dispatch_meeting(params, epoch);
  const Arrival ours = arrival(params);
  if (block_index() == 0) meeting.announce(ours);
  const bool sends = block_index() >= params.first_sender;
  const bool tells = params.fresh && block_index() == 0;
#pragma unroll 1
  for (int step = 0; step < 2; ++step) {
    if (tells && step == (params.told.apart() ? 0 : 1)) tell_selections(params, epoch);
    const bool good = step == 1 || meeting.hear_all(ours, sends);
    bulk::fence_global();  // windows that are free may be overwritten by bulk stores
    if (step == 0 && !block::all(good)) return false;
  }
  if (!sends) return true;

  // 3. Send.
  sender.send();
  if (!last_block_to_arrive(&common.state->ticket, params.sending_blocks)) return true;
  block::each(common.num_ranks, [&](int peer) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::dispatch_rows), Progress::at(epoch, 1));
  });
  if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->next_piece, std::uint32_t{0});
  return true;
}

/// By the last block of the grid, at its end: if its own work is `good`, waits for the rows of every source. Then it
/// reports a source that means another call, unless all are known to `agree`, and counts the call.
///
/// No block reads that count later. Those that tell or send have begun before this rank's own rows are there, and those
/// that number, of ranks that agree, when they have added their counts. After a fault a block that begins takes no
/// part.
DEEP_EP_DEVICE void end_dispatch(const ElasticDispatchParams& params, const Call& call, bool good, bool agree) {
  const IntranodeParams& common = params.common;
  // By the warp that numbers nothing where the host is told: the others may be at it.
  const bool waits = good && warp_index() == block_warps() - 1;
#pragma unroll 1
  for (int peer = lane_index(); waits && peer < common.num_ranks; peer += kWarpSize) {
    wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::dispatch_rows),
                {peer, Wanted::dispatch_rows, Progress::at(call.epoch, 1)});
  }
  block::sync();
  if (!agree) {
    block::each(common.num_ranks, [&](int peer) {
      agrees_on_call(params.wait, params.shape, params.told.shape(common.own_heap(), peer, call.epoch), peer);
    });
    block::sync();
  }
  // Released, so that a block that begins late finds the fault, by which the call may have ended, behind the count.
  if (thread_index() == 0 && call.begun) store_release<Scope::gpu>(&call.counter.calls, call.epoch);
}

DEEP_EP_DEVICE void dispatch_elastic_body(const ElasticDispatchParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const WarpStages shared(Carver(memory), params.sending_warps, params.pipe);
  ElasticSender sender{params, shared.pipe(warp_index() < params.sending_warps ? warp_index() : 0)};
  const std::uint64_t epoch = common.state->dispatch.epoch();
  const bool may_begin = !aborted(params.wait);
  sender.prepare();
  const Call call{common.state->dispatch, epoch, block::all(may_begin)};

  bool good = call.begun, agree = true;
  if (good && block_index() < params.first_sender + params.sending_blocks) {
    good = meet_and_send(params, epoch, sender);
  }
  sender.pipe.drop();  // what is prepared and not sent
  if (good && params.fresh && block_index() >= grid_blocks() - params.numbers.blocks) {
    agree = ToldTokens{params, epoch}.number(memory + params.numbers_at);
  }
  if (block_index() == grid_blocks() - 1) end_dispatch(params, call, good, agree);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch_elastic, deep_ep::device::dispatch_elastic_body)
