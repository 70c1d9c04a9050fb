// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token at
// a rank is how many tokens before it have an expert there. So a rank finds the places of the rows that come, and those
// of its own tokens' rows at their owners, without asking anybody.
//
// Columns of counters (rows/numbering.hpp) are rows for each rank, selections of each local expert, and rows of this
// rank from each source.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/elastic/dispatch_params.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE Meeting<ReportLate> dispatch_meeting(const ElasticDispatchParams& params, std::uint64_t epoch) {
  return {
      .common = params.common, .wait = {params.wait}, .wanted = Wanted::dispatch_addresses, .slot = 0, .epoch = epoch};
}

struct DispatchNumberer {
  const ElasticDispatchParams& params;
  const NumberingShared& shared;
  std::uint64_t epoch;
  std::int32_t* scratch;
  const SelectionNumbers counted{shared, DispatchNumbers::columns(num_ranks(), params.num_local_experts),
                                 numbers().warps, block_index() - (grid_blocks() - numbers().blocks), numbers().blocks};

  DEEP_EP_DEVICE const DispatchNumbers& numbers() const { return params.numbers; }
  DEEP_EP_DEVICE int num_ranks() const { return params.common.num_ranks; }
  DEEP_EP_DEVICE int num_topk() const { return params.rows.num_topk; }
  DEEP_EP_DEVICE int column_of_expert(int local) const { return num_ranks() + local; }
  DEEP_EP_DEVICE int column_of_source(int source) const { return num_ranks() + params.num_local_experts + source; }

  /// Waits for the selections of all ranks, and learns how many tokens each has. False after a fault, and if ranks do
  /// not mean the same call (`agree`), which the kernel's last block reports.
  DEEP_EP_DEVICE bool await_selections(bool& agree) const {
    const Meeting<ReportLate> meeting = dispatch_meeting(params, epoch);
    // First until all have come: a rank tells nothing before, and is not to blame for one that does not come.
    bool good = meeting.await_all(), same = true;
    if (!whole_block(good, scratch)) return false;
    block::each(num_ranks(), [&](int peer) {
      good = wait_signal(params.wait, params.common.signal_from(peer, IntranodeSignal::selections),
                         {peer, Wanted::counts, epoch}) &&
             good;
      if (!good) return;
      const ToldSelections::Shape& theirs = params.told.shape(params.common.own_heap(), peer, epoch);
      shared.source_ends[peer] = static_cast<std::int32_t>(theirs.num_tokens);
      same = differing_word(params.call, theirs) < 0 && same;
    });
    if (whole_block(good && same, scratch)) return true;
    agree = !whole_block(good, scratch);  // else nothing is known of those that have not told
    return false;
  }

  /// By one warp: where the tokens of each source end.
  DEEP_EP_DEVICE void find_tokens() const {
    std::int32_t end = 0;
#pragma unroll 1
    for (int first = 0; first < num_ranks(); first += kWarpSize) {
      const int source = first + lane_index();
      const std::int32_t through = end + warp::inclusive_sum(source < num_ranks() ? shared.source_ends[source] : 0);
      if (source < num_ranks()) shared.source_ends[source] = through;
      end = warp::shuffle(through, kWarpSize - 1);
    }
  }

  /// Whole tokens that a warp takes at once.
  DEEP_EP_DEVICE int tokens_at_once() const { return kWarpSize / num_topk(); }
  /// Tokens, as the sources have them one behind the other.
  DEEP_EP_DEVICE Share<int> share_of_block() const {
    return counted.share_of_block(shared.source_ends[num_ranks() - 1], tokens_at_once());
  }
  DEEP_EP_DEVICE std::int32_t first_token(int source) const { return source == 0 ? 0 : shared.source_ends[source - 1]; }
  /// Selection k of the token at `position`, which is one of `source`.
  DEEP_EP_DEVICE const std::int32_t* selection_at(int source, int position, int k) const {
    const int token = position - first_token(source);
    return params.told.of(params.common.own_heap(), source, epoch) + std::int64_t{token} * num_topk() + k;
  }

  /// A selection, as a lane of a warp sees it that looks at several tokens.
  struct Selection {
    std::int32_t token;  ///< at its source
    int source, k;
    int local;           ///< the expert, if it is one of this rank, else -1
    int rank;            ///< of the expert, -1: none
    std::uint32_t same;  ///< lanes with selections of the same token at the same rank
    std::uint32_t token_lanes;
    bool there;

    /// One lane for each row.
    DEEP_EP_DEVICE bool leads() const { return rank >= 0 && lowest_bit(same) == lane_index(); }
  };

  /// By a whole warp: `visit(selection)` for its share.
  template <class Visit>
  DEEP_EP_DEVICE void for_each_selection(Visit visit) const {
    const Share<int> share = counted.share_of_warp(share_of_block(), tokens_at_once());
    const int topk = num_topk(), at_once = tokens_at_once(), experts = params.num_local_experts;
    const int of_lane = lane_index() / topk;
    int source = 0;
#pragma unroll 1
    for (int first = share.begin; first < share.end; first += at_once) {
      const int position = first + of_lane;
      Selection selection{};
      selection.there = of_lane < at_once && position < share.end;
      selection.rank = selection.local = -1;
      selection.k = lane_index() - of_lane * topk;
      selection.token_lanes = (topk == kWarpSize ? 0xffffffffu : (1u << topk) - 1) << (of_lane * topk % kWarpSize);
      if (selection.there) {
        while (position >= shared.source_ends[source]) ++source;
        selection.source = source;
        selection.token = position - first_token(source);
        const std::int32_t expert = load_weak(selection_at(source, position, selection.k));
        if (expert >= 0) selection.rank = expert / experts;
        if (selection.rank == params.common.rank) selection.local = expert - selection.rank * experts;
      }
      const int of_token = of_lane * kMaxRanks + selection.rank;
      selection.same = warp::match_any(selection.rank < 0 ? ~0u : static_cast<std::uint32_t>(of_token));
      visit(selection);
    }
  }

  DEEP_EP_DEVICE void count() const {
    for_each_selection([&](const Selection& selection) {
      if (selection.leads()) counted.count(selection.rank);
      if (selection.local < 0) return;
      counted.count(column_of_expert(selection.local));
      if (selection.leads()) counted.count(column_of_source(selection.source));
    });
  }

  /// By the first of these blocks: what is said of each source and each expert.
  DEEP_EP_DEVICE void write_totals() const {
    block::each(params.num_local_experts, [&](int expert) {
      write_expert(numbers(), expert, shared.totals[column_of_expert(expert)], shared.starts[expert],
                   params.call.expert_alignment);
    });
    if (thread_index() != 0) return;
    std::int32_t end = 0;
#pragma unroll 1
    for (int source = 0; source < num_ranks(); ++source) {
      end += shared.totals[column_of_source(source)];
      numbers().source_ends[source] = end;
    }
  }

  /// By a whole warp, which has nothing to number meanwhile: a word to the host takes long to arrive.
  DEEP_EP_DEVICE void tell_host(HostCounts& host) const {
#pragma unroll 1
    for (int expert = lane_index(); expert < params.num_local_experts; expert += kWarpSize) {
      host.tokens_per_expert[expert] =
          rounded_up(shared.totals[column_of_expert(expert)], params.call.expert_alignment);
    }
    if (lane_index() == 0) host.num_recv_tokens = shared.totals[params.common.rank];
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(&host.epoch, epoch);
  }

  DEEP_EP_DEVICE void write_numbers() const {
    const int topk = num_topk(), max_tokens = params.window.max_tokens;
    for_each_selection([&](const Selection& selection) {
      // Of the token at the expert's rank.
      const std::int32_t of_leader = counted.take(selection.rank, 0, selection.leads());
      const std::int32_t row = warp::shuffle(of_leader, lowest_bit(selection.same));
      if (selection.there && selection.source == params.common.rank) {
        numbers().rows_at_owners[std::int64_t{selection.token} * topk + selection.k] = selection.rank < 0 ? -1 : row;
      }

      // Of the row that comes to this rank.
      const bool here = selection.local >= 0;
      std::int32_t slot = -1;
      if (numbers().expand) {
        slot = counted.take(column_of_expert(selection.local), here ? shared.starts[selection.local] : 0, here);
      }
      const std::uint32_t of_token = warp::ballot(here) & selection.token_lanes;
      const std::int32_t received = warp::shuffle(row, of_token != 0 ? lowest_bit(of_token) : 0);
      if (!selection.there || of_token == 0) return;
      numbers().metadata.slots(received)[selection.k] = slot;
      numbers().local[std::int64_t{received} * topk + selection.k] = selection.local;
      if (selection.k != 0) return;
      numbers().metadata.row(received)[0] = selection.source * max_tokens + selection.token;
      numbers().metadata.row(received)[1] = selection.source * topk + highest_bit(of_token) - lane_index();
    });
  }

  /// By all threads of these blocks: rows that hold nothing.
  DEEP_EP_DEVICE void clear_rows_behind() const {
    clear_rows(numbers(), shared.totals[params.common.rank] + counted.block * block_threads() + thread_index(),
               std::int64_t{numbers().blocks} * block_threads());
  }

  /// By a whole block. False if ranks do not mean the same call.
  DEEP_EP_DEVICE bool number() const {
    bool agree = true;
    if (!await_selections(agree)) return agree;

    // 1. Count the warp's share.
    if (warp_index() == 0) find_tokens();
    counted.clear();
    block::sync();
    count();
    block::sync();

    // 2. Add what the others have counted.
    const bool good = counted.add(numbers().exchange, epoch, scratch, [&] {
      return wait_signal(params.wait, numbers().exchange.counted, {params.common.rank, Wanted::counts, epoch});
    });
    if (!good) return true;
    if (warp_index() == 0) {
      find_starts(shared.totals + num_ranks(), params.num_local_experts, params.call.expert_alignment, shared.starts);
    }
    block::sync();

    // 3. Number.
    if (counted.block == 0) {
      HostCounts* const host = params.call.host_counts;
      if (host != nullptr && warp_index() == block_warps() - 1) tell_host(*host);
      write_totals();
    }
    write_numbers();
    if (numbers().clear_tail) clear_rows_behind();
    return true;
  }
};

}  // namespace deep_ep::device
