// Dispatch of the second interface: every token's row goes once to each other rank that has one of its experts, to the
// token's own place in that rank's window. A sender needs no counts.
//
// (1) Ranks meet: their windows are free, and all mean the same call. (2) A fresh dispatch tells all ranks this rank's
// selections. (3) Rows travel; meanwhile further blocks number the selections of all ranks (dispatch_number.hpp), and
// tell the host how many rows come. (4) The last block waits for the rows of all others. Another kernel
// (rows/spread_rows.cu) then copies rows from their places to the results.
//
// Of a few tokens each step is one latency, so none waits for what it does not need: first rows come to shared memory
// while ranks meet, ranks meet by cells, few selections are told before ranks have met, and the last block waits for
// rows and for no other block.
//
// No rank overwrites rows that this one still reads: a rank sends when it has heard that this one has begun the call,
// which this one does behind whatever it reads from its window, in stream order.
#include "kernels/elastic/dispatch_number.hpp"
#include "kernels/elastic/dispatch_send.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE bool is_last_block() { return block_index() == grid_blocks() - 1; }

/// By the first block: tells all ranks this rank's selections.
DEEP_EP_DEVICE void tell_selections(const ElasticDispatchParams& params, std::uint64_t epoch) {
  constexpr int kTogether = ToldSelections::kOfCell;  // and a vector's
  const IntranodeParams& common = params.common;
  const bool few = params.told.apart();
  const std::int64_t end = std::int64_t{params.num_tokens} * params.rows.num_topk;
  const int experts = params.num_local_experts * common.num_ranks;
#pragma unroll 1
  for (std::int64_t at = thread_index() * kTogether; at < end; at += block_threads() * kTogether) {
    std::int64_t index[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) index[i] = at + i < end ? params.topk_idx.load_cached(at + i) : -1;
    Vec16 told;
    std::uint64_t packed = 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      told.word[i] = static_cast<std::uint32_t>(expert_of(index[i], experts));
      packed |= std::uint64_t{told.word[i] & 0xffff} << 16 * i;
    }
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      std::int32_t* const to = params.told.of(common.heaps[peer], common.rank, epoch) + at;
      if (few) {
        store_cell(reinterpret_cast<Cell*>(to), packed, epoch);
      } else {
        *reinterpret_cast<Vec16*>(to) = told;
      }
    }
    for (int i = 0; params.numbers.selected != nullptr && i < kTogether && at + i < end; ++i) {
      store_topk_index(params.numbers.selected, params.topk_idx.is_64_bit, at + i, index[i]);
    }
  }
  if (few) return;
  block::sync();
  block::each(common.num_ranks, [&](int peer) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::selections), epoch);
  });
}

/// Ranks meet: this one learns that all mean the same call, so that they lay out windows alike, that those of the
/// others are free, and how many tokens each has (`tokens`, nullptr where nobody asks). Its selections are told then,
/// or before, if their place is free anyway. False after a fault, and if ranks do not mean the same call.
///
/// Of the differences that end the call alone, and not the buffer, the last block puts one on record: it counts the
/// call, and a block that begins after a fault takes no part.
DEEP_EP_DEVICE bool meet(const ElasticDispatchParams& params, std::uint64_t epoch, std::int32_t* tokens) {
  const RowShape& rows = params.rows;
  const int scales = params.fresh ? rows.num_scales : static_cast<int>(params.window.words_beside);
  const DispatchArrival ours{{static_cast<std::int32_t>(rows.row_bytes), scales, rows.num_topk,
                              params.window.max_tokens, params.fresh ? 0 : 1},
                             params.num_tokens,
                             params.shape};
  const Meeting meeting{params.common, Wanted::dispatch_addresses, MeetingKind::dispatch, epoch};
  if (block_index() == 0) meeting.announce(ours);
  const bool tells = params.fresh && block_index() == 0;
  if (tells && params.told.apart()) tell_selections(params, epoch);
  bool good = true;
  Difference found;
  int other = 0;
  block::each(params.common.num_ranks, [&](int peer) {
    DispatchArrival theirs;
    good = good && meeting.hear(peer, theirs) && meeting.agrees(ours.agreed, theirs.agreed, peer);
    if (!good) return;
    if (tokens != nullptr) tokens[peer] = theirs.num_tokens;
    if (found.at >= 0) return;
    found = difference(ours.shape.word, theirs.shape.word);
    other = peer;
  });
  if (!block::all(good && found.at < 0)) {
    // When all have come: a rank that left before would be calls ahead of one that is late. No rank sends anything, so
    // words of rows move on as if all had.
    if (block::all(good) && is_last_block()) {
      block::each(params.common.num_ranks, [&](int peer) {
        std::uint64_t* const word = params.common.signal_to(peer, IntranodeSignal::dispatch_rows);
        store_relaxed<Scope::system>(word, Progress::at(epoch));
      });
      if (found.at >= 0) meeting.report(found, other, Wanted::counts);
    }
    return false;
  }
  if (tells && !params.told.apart()) tell_selections(params, epoch);
  bulk::fence_global();  // windows that are free may be overwritten by bulk stores
  return true;
}

/// By the last block of the grid, at its end: if its own work is `good`, waits for the rows of every source. Then it
/// counts the call.
///
/// No block reads that count later. Those that tell or send have begun before this rank's own rows are there, and those
/// that number when they have added their counts. After a fault, or a difference, a block that begins takes no part.
DEEP_EP_DEVICE void end_dispatch(const ElasticDispatchParams& params, const Call& call, bool good) {
  const IntranodeParams& common = params.common;
  // By the warp that numbers nothing where the host is told: the others may be at it.
  const bool waits = good && warp_index() == block_warps() - 1;
  warp::each(waits ? common.num_ranks : 0, [&](int peer) {
    wait_signal(common.wait, common.signal_from(peer, IntranodeSignal::dispatch_rows),
                {peer, Wanted::dispatch_rows, Progress::at(call.epoch)});
  });
  block::sync();
  if (thread_index() != 0 || !call.begun) return;
  store_relaxed<Scope::gpu>(&common.state->pieces_drawn, std::uint32_t{0});  // this rank's own rows are there, too
  // A block that begins late may read this count, and not yet the fault that has ended the call. It waits for this
  // rank's own message of the next call, which does not come, and then finds the fault.
  call.counter.count(call.epoch);
}

DEEP_EP_DEVICE void dispatch_elastic_body(const ElasticDispatchParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const WarpStages shared{Carver(memory), params.sending_warps, params.pipe};
  ElasticSender sender{params, shared.pipe(warp_index() < params.sending_warps ? warp_index() : 0)};
  const std::uint64_t epoch = common.state->dispatch.epoch();
  const bool may_begin = !aborted(common.wait);
  sender.prepare();
  const Call call{common.state->dispatch, epoch, block::all(may_begin)};

  // A block that numbers sends nothing: what it shares begins at `memory`, like the pipelines of a block that sends.
  const bool numbers = params.fresh && block_index() >= grid_blocks() - params.numbers.blocks;
  const ToldTokens told{params, epoch, {Carver(memory), params.numbers, ToldTokens::kOfAllRanks}};
  const bool good = call.begun && meet(params, epoch, numbers ? told.shared.source_ends : nullptr);
  if (good && sender.sends()) sender.send();
  sender.pipe.drop();  // what is prepared and not sent
  if (good && numbers) told.number();
  if (is_last_block()) end_dispatch(params, call, good);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(dispatch_elastic, deep_ep::device::dispatch_elastic_body)
