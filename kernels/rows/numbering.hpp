// How kernels number what selections name, in the order of their tokens: blocks and their warps take the tokens one
// share after the other. (1) Each warp counts its share, a column for each kind of number; (2) what earlier blocks and
// warps have counted is added up; (3) the warp goes through its share again and takes numbers.
#pragma once

#include "kernels/common/messages.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// By one warp: `put(i, sum)` for each i below `count`, the sum of the values of those up to i.
template <class Value, class Put>
DEEP_EP_DEVICE void running_sums(int count, Value value, Put put) {
  std::int32_t before = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += kWarpSize) {
    const int i = first + lane_index();
    const std::int32_t sum = before + warp::inclusive_sum(i < count ? value(i) : 0);
    if (i < count) put(i, sum);
    before = warp::shuffle(sum, kWarpSize - 1);
  }
}

/// A selection, as a lane of a warp sees it that looks at several tokens.
struct Selection {
  int position;  ///< of the token among those that are numbered
  int k;
  int source = -1;         ///< none: there is no such selection
  std::int32_t token = 0;  ///< the number that its source gives the token
  int local = -1;          ///< the expert, if it is one of this rank
  std::uint32_t here = 0;  ///< lanes with selections of the same token at this rank

  /// One lane for each row.
  DEEP_EP_DEVICE bool leads() const { return here != 0 && lowest_bit(here) == lane_index(); }
};

/// By whole blocks that number. `Tokens` says which tokens there are, as sources have them one behind the other:
///   kOfAllRanks               tokens of all ranks; false: rows of this one, which have numbers already
///   find(selection, good)     sets its token, and its expert. `good` becomes false after a fault
///   tell_host(numberer)       by a warp of one block, when all have counted
template <class Tokens>
struct SelectionNumberer {
  const Tokens& tokens;
  const NumberingParams& params;
  const NumberingShared& shared;  ///< source_ends say where the tokens of each source end
  const WaitContext& wait;
  const int block = block_index() - (grid_blocks() - params.blocks);
  const int columns = params.columns(Tokens::kOfAllRanks);

  // The column of a local expert is its number.
  DEEP_EP_DEVICE int column_of_source(int source) const { return params.num_experts + source; }
  DEEP_EP_DEVICE std::int32_t* own() const { return shared.next + warp_index() * columns; }

  /// By a whole warp: the selections of the tokens from `first` on, of those before `end`. `source` is not behind that
  /// of the first.
  DEEP_EP_DEVICE Selection look(int first, int end, int& source, bool& good) const {
    const Divisor& topk = params.metadata.num_topk;
    const int of_lane = lane_index() / topk;
    Selection selection{first + of_lane, lane_index() - of_lane * topk};
    if (of_lane < kWarpSize / topk && selection.position < end) {
      while (selection.position >= shared.source_ends[source]) ++source;
      selection.source = source;
      tokens.find(selection, good);
    }
    const std::uint32_t token_lanes = (topk == kWarpSize ? ~0u : (1u << topk) - 1) << of_lane * topk;
    selection.here = warp::ballot(selection.local >= 0) & token_lanes;
    return selection;
  }

  // (1)

  /// By a whole warp.
  DEEP_EP_DEVICE void count(const Selection& selection) const {
    if (selection.local >= 0) add_relaxed<Scope::block>(own() + selection.local, 1);
    if (!Tokens::kOfAllRanks || !selection.leads()) return;
    add_relaxed<Scope::block>(own() + column_of_source(selection.source), 1);
  }

  // (2)

  /// By a thread: adds up what the warps have counted, each finds what those before it have.
  DEEP_EP_DEVICE std::int32_t add_warps(int column) const {
    std::int32_t count[NumberingParams::kMostWarps], sum = 0;
#pragma unroll
    for (int warp = 0; warp < NumberingParams::kMostWarps; ++warp) {
      if (warp < params.warps) count[warp] = shared.next[warp * columns + column];
    }
#pragma unroll
    for (int warp = 0; warp < NumberingParams::kMostWarps; ++warp) {
      if (warp >= params.warps) break;
      shared.next[warp * columns + column] = sum;
      sum += count[warp];
    }
    return sum;
  }

  /// By all threads, when the warps have counted: finds what each block and warp has before it, and the totals. Blocks
  /// tell each other; one that is alone need not. False after a fault.
  DEEP_EP_DEVICE bool add() const {
    const bool alone = params.blocks == 1;
    block::each(columns, [&](int column) {
      const std::int32_t count = add_warps(column);
      shared.starts[column] = 0;
      shared.totals[column] = alone ? count : 0;
      if (!alone) params.counts[std::int64_t{block} * columns + column] = count;
    });
    block::sync();
    if (alone) return true;
    bool good = true;
    if (thread_index() == 0) {
      std::uint64_t* const counted = params.counted;  // moves on when all have added, this block among them
      const std::uint64_t call = Progress::call_of(load_relaxed<Scope::gpu>(counted)) + 1;
      add_release<Scope::gpu>(counted, Progress::part_of_call(params.blocks, block == 0));
      good = wait_signal(wait, counted, {params.rank, Wanted::counts, Progress::at(call)});
    }
    if (!block::all(good)) return false;
    warp::each(columns, [&](int column) {
      std::int32_t before = 0, total = 0;
      // Warps share the blocks, whose counts they load in groups.
#pragma unroll 4
      for (int other = warp_index(); other < params.blocks; other += block_warps()) {
        const std::int32_t count = load_weak(params.counts + std::int64_t{other} * columns + column);
        total += count;
        before += other < block ? count : 0;
      }
      add_relaxed<Scope::block>(&shared.starts[column], before);
      add_relaxed<Scope::block>(&shared.totals[column], total);
    });
    block::sync();
    return true;
  }

  /// By one warp: the rows of each of `count` columns begin behind those of the columns before, rounded up.
  DEEP_EP_DEVICE void find_starts(int first, int count, const Divisor& alignment) const {
    const auto rows = [&](int i) { return align_up(shared.totals[first + i], alignment); };
    running_sums(count, rows, [&](int i, std::int32_t end) { shared.starts[first + i] += end - rows(i); });
  }
  /// By the first block, when starts are found: where the rows of a source end.
  DEEP_EP_DEVICE std::int32_t end_of(int source) const {
    const int column = column_of_source(source);
    return Tokens::kOfAllRanks ? shared.starts[column] + shared.totals[column] : shared.source_ends[source];
  }

  /// By the first block: what is said of each source and each expert.
  DEEP_EP_DEVICE void write_totals() const {
    block::each(params.num_experts, [&](int expert) {
      const std::int32_t count = shared.totals[expert];
      params.expert_counts[expert] = count;
      params.expert_ends[expert] = shared.starts[expert] + (params.expand ? count : align_up(count, params.alignment));
      if (params.stats != nullptr) params.stats[expert] += count;
    });
    block::each(params.num_ranks, [&](int source) { params.source_ends[source] = end_of(source); });
  }

  // (3)

  /// By a whole warp: the next numbers of a column, for the lanes that want one, in their order; else -1.
  DEEP_EP_DEVICE std::int32_t take(int column, bool wanted) const {
    std::int32_t* const next = own();
    const std::uint32_t same = warp::match_any(wanted ? static_cast<std::uint32_t>(column) : ~0u);
    const std::uint32_t earlier = same & ((1u << lane_index()) - 1);
    const std::int32_t number = wanted ? shared.starts[column] + next[column] + count_bits(earlier) : -1;
    warp::sync();
    if (wanted && earlier == 0) next[column] += count_bits(same);
    warp::sync();
    return number;
  }

  /// By a whole warp.
  DEEP_EP_DEVICE void write(const Selection& selection) const {
    const int topk = params.metadata.num_topk;
    std::int32_t row = selection.position;
    if (Tokens::kOfAllRanks) {
      const std::int32_t of_leader = take(column_of_source(selection.source), selection.leads());
      row = warp::shuffle(of_leader, selection.here != 0 ? lowest_bit(selection.here) : lane_index());
      if (selection.source == params.rank) params.own_rows[std::int64_t{selection.token} * topk + selection.k] = row;
    }
    const std::int32_t slot = params.expand ? take(selection.local, selection.local >= 0) : -1;
    if (selection.here == 0) return;
    params.metadata.slots(row)[selection.k] = slot;
    params.local[std::int64_t{row} * topk + selection.k] = selection.local;
    if (selection.k != 0) return;
    params.metadata.row(row)[0] = selection.source * params.max_tokens + selection.token;
    params.metadata.row(row)[1] = selection.source * topk + highest_bit(selection.here) - lane_index();
  }

  /// By all threads of these blocks, which have written source_ends. `good`: false after a fault that this thread has
  /// met.
  DEEP_EP_DEVICE void number(bool good) const {
    block::each(params.warps * columns, [&](int at) { shared.next[at] = 0; });
    if (!block::all(good)) return;
    const int at_once = kWarpSize / params.metadata.num_topk, all = shared.source_ends[params.num_ranks - 1];
    const int share = (all + params.all_warps - 1) / params.all_warps;  // tokens of a warp
    const int begin = warp_index() < params.warps ? (block * params.warps + warp_index()) * share : all;
    const int end = begin + share < all ? begin + share : all;
    Selection selection{};
#pragma unroll 1
    for (bool counted = false;; counted = true) {
      int source = 0;
#pragma unroll 1
      for (int first = begin; first < end; first += at_once) {
        // A warp that looks only once still knows what it has counted.
        if (!counted || share > at_once) selection = look(first, end, source, good);
        counted ? write(selection) : count(selection);
      }
      if (counted || !block::all(good) || !add()) return;
      if (warp_index() == 0) {
        find_starts(0, params.num_experts, params.alignment);
        if (Tokens::kOfAllRanks) find_starts(column_of_source(0), params.num_ranks, {});
      }
      block::sync();
      if (block != 0) continue;
      // By a warp that has nothing to number meanwhile: a word to the host takes long to arrive.
      if (warp_index() == block_warps() - 1) tokens.tell_host(*this);
      write_totals();
    }
  }
};

}  // namespace deep_ep::device
