// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token at
// a rank is how many tokens before it have an expert there. So a rank finds the places of the rows that come, and those
// of its own tokens' rows at their owners, without asking anybody.
//
// Blocks and their warps take the tokens in order, each its share: (1) the block brings its share to shared memory, and
// each warp counts; (2) what earlier blocks and warps have counted is added up; (3) the warp goes through its share
// again and numbers.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/elastic/dispatch_params.hpp"
#include "kernels/elastic/meet.hpp"
#include "kernels/normal/notify.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/rows/shares.hpp"
#include "kernels/rows/tables.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE Meeting dispatch_meeting(const ElasticDispatchParams& params, std::uint64_t epoch) {
  return {params.common, params.wait, Wanted::dispatch_addresses, 0, epoch};
}

struct DispatchNumberer {
  const ElasticDispatchParams& params;
  const DispatchNumbersShared& shared;
  std::uint64_t epoch;
  std::int32_t* scratch;

  DEEP_EP_DEVICE const DispatchNumbers& numbers() const { return params.numbers; }
  DEEP_EP_DEVICE int num_ranks() const { return params.common.num_ranks; }
  DEEP_EP_DEVICE int num_topk() const { return params.rows.num_topk; }
  DEEP_EP_DEVICE int columns() const { return DispatchNumbers::columns(num_ranks(), params.num_local_experts); }
  DEEP_EP_DEVICE int block() const { return block_index() - (grid_blocks() - numbers().blocks); }
  DEEP_EP_DEVICE int column_of_expert(int local) const { return num_ranks() + local; }
  DEEP_EP_DEVICE int column_of_source(int source) const { return num_ranks() + params.num_local_experts + source; }

  /// Waits for the selections of all ranks, and learns how many tokens each has. False after a fault, and if ranks do
  /// not mean the same call (`agree`), which the kernel's last block reports.
  DEEP_EP_DEVICE bool await_selections(bool& agree) const {
    const Meeting meeting = dispatch_meeting(params, epoch);
    bool good = true, same = true;
    // First until all have come: a rank tells nothing before, and is not to blame for one that does not come.
    for (int peer = thread_index(); peer < num_ranks(); peer += block_threads()) {
      Arrival theirs;
      good = meeting.hear(peer, theirs) && good;
      same = same && theirs.fingerprint == params.fingerprint;
    }
    if (!whole_block(good, scratch)) return false;
    for (int peer = thread_index(); peer < num_ranks(); peer += block_threads()) {
      const std::uint64_t* signal = params.common.signal_from(peer, IntranodeSignal::selections);
      const Awaited selections{peer, Wanted::counts, Progress::at(epoch)};
      std::uint64_t word = 0;
      const auto told = [&](Poll& poll) {
        word = poll.seen = load_acquire<Scope::system>(signal);
        return word >= selections.expected;
      };
      good = wait_until(ReportLateHere{{params.wait}}, selections, told) && good;
      shared.source_ends[peer] = static_cast<std::int32_t>(word);
    }
    if (!whole_block(good, scratch)) return false;
    agree = whole_block(same, scratch);
    return agree;
  }

  /// By one warp: where the tokens of each source end.
  DEEP_EP_DEVICE void find_tokens() const {
    std::int32_t end = 0;
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
  DEEP_EP_DEVICE Share share_of_block() const {
    return part_of({0, shared.source_ends[num_ranks() - 1]}, block(), numbers().blocks, tokens_at_once());
  }
  DEEP_EP_DEVICE Share share_of_warp(const Share& of_block) const {
    if (warp_index() >= numbers().warps) return {0, 0};
    return part_of(of_block, warp_index(), numbers().warps, tokens_at_once());
  }
  DEEP_EP_DEVICE std::int32_t first_token(int source) const { return source == 0 ? 0 : shared.source_ends[source - 1]; }
  /// Selection k of the token at `position`, which is one of `source`.
  DEEP_EP_DEVICE const std::int32_t* selection_at(int source, std::int64_t position, int k) const {
    return params.told.of(params.common.own_heap(), source) + (position - first_token(source)) * num_topk() + k;
  }

  /// By all threads of the block: its selections, as far as there is room, come to shared memory. They are read twice.
  DEEP_EP_DEVICE void stage() const {
    constexpr int kTogether = 4;  // loads under way at once
    const Share share = share_of_block();
    const std::int64_t all = (share.end - share.begin) * num_topk();
    const int count = all < numbers().staged ? static_cast<int>(all) : numbers().staged;
    int source = 0;
    for (int first = thread_index(); first < count; first += kTogether * block_threads()) {
      std::int32_t expert[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = first + i * block_threads();
        if (at >= count) break;
        const int token = at / num_topk();
        while (share.begin + token >= shared.source_ends[source]) ++source;
        expert[i] = load_weak(selection_at(source, share.begin + token, at - token * num_topk()));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = first + i * block_threads();
        if (at < count) shared.staged[at] = expert[i];
      }
    }
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
    const Share of_block = share_of_block(), share = share_of_warp(of_block);
    const int topk = num_topk(), at_once = tokens_at_once(), experts = params.num_local_experts;
    const int of_lane = lane_index() / topk;
    int source = 0;
    for (std::int64_t first = share.begin; first < share.end; first += at_once) {
      const std::int64_t position = first + of_lane;
      Selection selection{};
      selection.there = of_lane < at_once && position < share.end;
      selection.rank = selection.local = -1;
      selection.k = lane_index() - of_lane * topk;
      selection.token_lanes = (topk == kWarpSize ? 0xffffffffu : (1u << topk) - 1) << (of_lane * topk % kWarpSize);
      if (selection.there) {
        while (position >= shared.source_ends[source]) ++source;
        selection.source = source;
        selection.token = static_cast<std::int32_t>(position) - first_token(source);
        const std::int64_t at = (position - of_block.begin) * topk + selection.k;
        const std::int32_t expert =
            at < numbers().staged ? shared.staged[at] : load_weak(selection_at(source, position, selection.k));
        if (expert >= 0) selection.rank = expert / experts;
        if (selection.rank == params.common.rank) selection.local = expert - selection.rank * experts;
      }
      const int of_token = of_lane * kMaxRanks + selection.rank;
      selection.same = warp::match_any(selection.rank < 0 ? ~0u : static_cast<std::uint32_t>(of_token));
      visit(selection);
    }
  }

  DEEP_EP_DEVICE void count(std::int32_t* counts) const {
    for_each_selection([&](const Selection& selection) {
      if (selection.leads()) add_relaxed<Scope::block>(&counts[selection.rank], 1);
      if (selection.local < 0) return;
      add_relaxed<Scope::block>(&counts[column_of_expert(selection.local)], 1);
      if (selection.leads()) add_relaxed<Scope::block>(&counts[column_of_source(selection.source)], 1);
    });
  }

  /// By a thread, of a column: adds up what the warps have counted, each finds what those before it have.
  DEEP_EP_DEVICE std::int32_t add_warps(int column) const {
    constexpr int kTogether = 8;
    const int width = columns(), warps = numbers().warps;
    std::int32_t sum = 0;
    for (int first = 0; first < warps; first += kTogether) {
      std::int32_t count[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i < warps) count[i] = shared.next[(first + i) * width + column];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= warps) break;
        shared.next[(first + i) * width + column] = sum;
        sum += count[i];
      }
    }
    return sum;
  }

  /// Blocks tell each other what they have counted; one that is alone has it at hand. False after a fault.
  DEEP_EP_DEVICE bool add_counts() const {
    const int width = columns();
    for (int column = thread_index(); column < width; column += block_threads()) {
      const std::int32_t count = add_warps(column);
      shared.before[column] = 0;
      shared.totals[column] = numbers().blocks == 1 ? count : 0;
      if (numbers().blocks > 1) numbers().block_counts[std::int64_t{block()} * width + column] = count;
    }
    block::sync();
    if (numbers().blocks == 1) return true;

    KernelState& state = *params.common.state;
    bool good = true;
    if (thread_index() == 0) {
      if (last_to_arrive<Scope::gpu>(&state.selections_ticket, static_cast<std::uint32_t>(numbers().blocks))) {
        store_release<Scope::gpu>(&state.selections_counted, epoch);
      }
      good = wait_signal(params.wait, &state.selections_counted, {params.common.rank, Wanted::counts, epoch});
    }
    if (!whole_block(good, scratch)) return false;
    for (int first = 0; first < width; first += kWarpSize) {
      const int column = first + lane_index();
      if (column >= width) break;
      std::int32_t before = 0, total = 0;
#pragma unroll 4
      for (int other = warp_index(); other < numbers().blocks; other += block_warps()) {
        const std::int32_t count = load_weak(numbers().block_counts + std::int64_t{other} * width + column);
        total += count;
        before += other < block() ? count : 0;
      }
      add_relaxed<Scope::block>(&shared.before[column], before);
      add_relaxed<Scope::block>(&shared.totals[column], total);
    }
    block::sync();
    return true;
  }

  /// By the first of these blocks: what is said of each source and each expert, and what the host is told.
  DEEP_EP_DEVICE void write_totals() const {
    HostCounts* const host = params.call.host_counts;
    const int alignment = params.call.expert_alignment;
    for (int expert = thread_index(); expert < params.num_local_experts; expert += block_threads()) {
      const std::int32_t count = shared.totals[column_of_expert(expert)];
      write_expert(numbers(), expert, count, shared.starts[expert], alignment);
      if (host != nullptr) host->tokens_per_expert[expert] = rounded_up(count, alignment);
    }
    if (thread_index() == 0) {
      std::int32_t end = 0;
      for (int source = 0; source < num_ranks(); ++source) {
        end += shared.totals[column_of_source(source)];
        numbers().source_ends[source] = end;
      }
      if (host != nullptr) host->num_recv_tokens = end;
    }
    if (host == nullptr) return;
    block::sync();
    if (thread_index() == 0) store_release<Scope::system>(&host->epoch, epoch);
  }

  /// By a whole warp: the next numbers of a column, whose numbers begin with `start`, for the lanes that want one, in
  /// their order.
  DEEP_EP_DEVICE std::int32_t take_numbers(std::int32_t* next, int column, std::int32_t start, bool wanted) const {
    const std::uint32_t same = warp::match_any(wanted ? static_cast<std::uint32_t>(column) : ~0u);
    const std::uint32_t earlier = same & ((1u << lane_index()) - 1);
    const std::int32_t number = wanted ? start + shared.before[column] + next[column] + count_bits(earlier) : -1;
    warp::sync();
    if (wanted && earlier == 0) next[column] += count_bits(same);
    warp::sync();
    return number;
  }

  DEEP_EP_DEVICE void write_numbers(std::int32_t* next) const {
    const int topk = num_topk(), max_tokens = params.window.max_tokens;
    for_each_selection([&](const Selection& selection) {
      // Of the token at the expert's rank.
      const std::int32_t of_leader = take_numbers(next, selection.rank, 0, selection.leads());
      const std::int32_t row = warp::shuffle(of_leader, lowest_bit(selection.same));
      if (selection.there && selection.source == params.common.rank) {
        numbers().rows_at_owners[std::int64_t{selection.token} * topk + selection.k] = selection.rank < 0 ? -1 : row;
      }

      // Of the row that comes to this rank.
      const bool here = selection.local >= 0;
      std::int32_t slot = -1;
      if (numbers().expand) {
        slot = take_numbers(next, column_of_expert(selection.local), here ? shared.starts[selection.local] : 0, here);
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
    clear_rows(numbers(), shared.totals[params.common.rank] + block() * block_threads() + thread_index(),
               std::int64_t{numbers().blocks} * block_threads());
  }

  /// By a whole block. False if ranks do not mean the same call.
  DEEP_EP_DEVICE bool number() const {
    bool agree = true;
    if (!await_selections(agree)) return agree;
    const int width = columns();
    std::int32_t* const next = shared.next + (warp_index() < numbers().warps ? warp_index() : 0) * width;

    // 1. Count the warp's share.
    if (warp_index() == 0) find_tokens();
    for (int at = thread_index(); at < numbers().warps * width; at += block_threads()) shared.next[at] = 0;
    block::sync();
    stage();
    block::sync();
    count(next);
    block::sync();

    // 2. Add what the others have counted.
    if (!add_counts()) return true;
    if (warp_index() == 0) {
      find_starts(shared.totals + num_ranks(), params.num_local_experts, params.call.expert_alignment, shared.starts);
    }
    block::sync();
    if (block() == 0) write_totals();

    // 3. Number.
    write_numbers(next);
    if (numbers().clear_tail) clear_rows_behind();
    return true;
  }
};

}  // namespace deep_ep::device
