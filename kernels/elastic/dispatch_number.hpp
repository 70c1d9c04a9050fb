// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token at
// a rank is how many tokens before it have an expert there. So a rank finds the places of the rows that come, and those
// of its own tokens' rows at their owners, without asking anybody.
//
// Warps take the tokens in order, each its share: (1) a warp counts its share; (2) what earlier blocks and warps have
// counted is added up; (3) the warp goes through its share again and numbers.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/elastic/dispatch_params.hpp"
#include "kernels/normal/notify.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/rows/shares.hpp"
#include "kernels/rows/tables.hpp"

namespace deep_ep::device {

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

  /// Waits for the selections of all ranks. False after a fault, and if they do not mean the same call, which the
  /// kernel's last block reports.
  DEEP_EP_DEVICE bool await_selections() const {
    const IntranodeParams& common = params.common;
    bool good = true;
    // First until all have come: a rank tells nothing before, and is not to blame for one that does not come.
    for (int peer = thread_index(); peer < num_ranks(); peer += block_threads()) {
      const std::uint64_t* signal = &common.control.dispatch_box(common.own_heap(), peer).signal;
      good = wait_signal(params.wait, signal, {peer, Wanted::dispatch_addresses, epoch}) && good;
    }
    if (!whole_block(good, scratch)) return false;
    for (int peer = thread_index(); peer < num_ranks(); peer += block_threads()) {
      const std::uint64_t* signal = common.signal_from(peer, IntranodeSignal::selections);
      good = wait_signal(params.wait, signal, {peer, Wanted::counts, epoch}) && good;
    }
    if (!whole_block(good, scratch)) return false;
    for (int peer = thread_index(); peer < num_ranks(); peer += block_threads()) {
      good = differing_word(params.call, params.told.header(common.own_heap(), peer).shape) < 0 && good;
    }
    return whole_block(good, scratch);
  }

  /// By one warp: where the tokens of each source end.
  DEEP_EP_DEVICE void find_tokens() const {
    std::int32_t end = 0;
    for (int first = 0; first < num_ranks(); first += kWarpSize) {
      const int source = first + lane_index();
      std::int32_t tokens = 0;
      if (source < num_ranks()) tokens = load_weak(&params.told.header(params.common.own_heap(), source).num_tokens);
      const std::int32_t through = end + warp::inclusive_sum(tokens);
      if (source < num_ranks()) shared.source_ends[source] = through;
      end = warp::shuffle(through, kWarpSize - 1);
    }
  }

  /// Whole tokens that a warp takes at once.
  DEEP_EP_DEVICE int tokens_at_once() const { return kWarpSize / num_topk(); }
  /// Tokens, as the sources have them one behind the other.
  DEEP_EP_DEVICE Share share_of_warp() const {
    const Share all{0, shared.source_ends[num_ranks() - 1]};
    if (warp_index() >= numbers().warps) return {0, 0};
    return part_of(part_of(all, block(), numbers().blocks, tokens_at_once()), warp_index(), numbers().warps,
                   tokens_at_once());
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
    const Share share = share_of_warp();
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
        selection.token = static_cast<std::int32_t>(position - (source == 0 ? 0 : shared.source_ends[source - 1]));
        const std::int32_t expert = load_weak(params.told.of(params.common.own_heap(), source) +
                                              std::int64_t{selection.token} * topk + selection.k);
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
      if (selection.leads()) fetch_add_relaxed<Scope::block>(&counts[selection.rank], 1);
      if (selection.local < 0) return;
      fetch_add_relaxed<Scope::block>(&counts[column_of_expert(selection.local)], 1);
      if (selection.leads()) fetch_add_relaxed<Scope::block>(&counts[column_of_source(selection.source)], 1);
    });
  }

  /// Blocks tell each other what they have counted; one that is alone has it at hand. False after a fault.
  DEEP_EP_DEVICE bool add_counts() const {
    const int width = columns(), warps = numbers().warps;
    for (int column = thread_index(); column < width; column += block_threads()) {
      std::int32_t count = 0;
      for (int warp = 0; warp < warps; ++warp) count += shared.next[std::int64_t{warp} * width + column];
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
      fetch_add_relaxed<Scope::block>(&shared.before[column], before);
      fetch_add_relaxed<Scope::block>(&shared.totals[column], total);
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
    block::sync();
    if (thread_index() == 0 && host != nullptr) store_release<Scope::system>(&host->epoch, epoch);
  }

  /// Each warp's first number of each kind.
  DEEP_EP_DEVICE void find_first_numbers() const {
    const int width = columns();
    for (int column = thread_index(); column < width; column += block_threads()) {
      const int expert = column - num_ranks();
      const bool of_expert = expert >= 0 && expert < params.num_local_experts;
      std::int32_t number = shared.before[column] + (of_expert ? shared.starts[expert] : 0);
      for (int warp = 0; warp < numbers().warps; ++warp) {
        std::int32_t& of_warp = shared.next[std::int64_t{warp} * width + column];
        const std::int32_t count = of_warp;
        of_warp = number;
        number += count;
      }
    }
  }

  /// By a whole warp: the next numbers of a column for the lanes that want one, in their order.
  DEEP_EP_DEVICE std::int32_t take_numbers(std::int32_t* next, int column, bool wanted) const {
    const std::uint32_t same = warp::match_any(wanted ? static_cast<std::uint32_t>(column) : ~0u);
    const std::uint32_t earlier = same & ((1u << lane_index()) - 1);
    const std::int32_t number = wanted ? next[column] + count_bits(earlier) : -1;
    warp::sync();
    if (wanted && earlier == 0) next[column] += count_bits(same);
    warp::sync();
    return number;
  }

  DEEP_EP_DEVICE void write_numbers(std::int32_t* next) const {
    const int topk = num_topk(), max_tokens = params.window.max_tokens;
    for_each_selection([&](const Selection& selection) {
      // Of the token at the expert's rank.
      const std::int32_t of_leader = take_numbers(next, selection.rank, selection.leads());
      const std::int32_t row = warp::shuffle(of_leader, lowest_bit(selection.same));
      if (selection.there && selection.source == params.common.rank) {
        numbers().rows_at_owners[std::int64_t{selection.token} * topk + selection.k] = selection.rank < 0 ? -1 : row;
      }

      // Of the row that comes to this rank.
      const bool here = selection.local >= 0;
      const std::int32_t slot = numbers().expand ? take_numbers(next, column_of_expert(selection.local), here) : -1;
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

  /// By a whole block.
  DEEP_EP_DEVICE void number() const {
    if (!await_selections()) return;
    const int width = columns();
    std::int32_t* const next = shared.next + std::int64_t{warp_index() < numbers().warps ? warp_index() : 0} * width;

    // 1. Count the warp's share.
    if (warp_index() == 0) find_tokens();
    for (int at = thread_index(); at < numbers().warps * width; at += block_threads()) shared.next[at] = 0;
    block::sync();
    count(next);
    block::sync();

    // 2. Add what the others have counted.
    if (!add_counts()) return;
    if (warp_index() == 0) {
      find_starts(shared.totals + num_ranks(), params.num_local_experts, params.call.expert_alignment, shared.starts);
    }
    block::sync();
    if (block() == 0) write_totals();
    find_first_numbers();
    block::sync();

    // 3. Number.
    write_numbers(next);
    if (numbers().clear_tail) clear_rows_behind();
  }
};

}  // namespace deep_ep::device
