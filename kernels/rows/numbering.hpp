// How kernels number what selections name, in order: blocks and their warps take the selections one share after the
// other. (1) Each warp counts its share, a column for each kind of number; (2) what earlier blocks and warps have
// counted is added up; (3) the warp goes through its share again and takes numbers.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

template <class Int>
struct Share {
  Int begin, end;
};

/// Part `number` of `parts` of `whole`, in multiples of `step`.
template <class Int>
DEEP_EP_DEVICE Share<Int> part_of(const Share<Int>& whole, int number, int parts, int step) {
  const Int steps = (whole.end - whole.begin + step - 1) / step;
  const Int each = (steps + parts - 1) / parts * step;
  const Int begin = whole.begin + number * each;
  const Int end = begin + each;
  return {begin < whole.end ? begin : whole.end, end < whole.end ? end : whole.end};
}

struct SelectionNumbers {
  const NumberingShared& shared;
  int columns, warps;  ///< that count, the first ones of a block
  int block, blocks;   ///< that number

  /// The warp's counters.
  DEEP_EP_DEVICE std::int32_t* own() const { return shared.next + (warp_index() < warps ? warp_index() : 0) * columns; }
  template <class Int>
  DEEP_EP_DEVICE Share<Int> share_of_block(Int end, int step) const {
    return part_of(Share<Int>{0, end}, block, blocks, step);
  }
  template <class Int>
  DEEP_EP_DEVICE Share<Int> share_of_warp(const Share<Int>& of_block, int step) const {
    if (warp_index() >= warps) return {0, 0};
    return part_of(of_block, warp_index(), warps, step);
  }

  /// By all threads of the block, and a sync behind it.
  DEEP_EP_DEVICE void clear() const {
    block::each(warps * columns, [&](int at) { shared.next[at] = 0; });
  }
  DEEP_EP_DEVICE void count(int column) const { add_relaxed<Scope::block>(own() + column, 1); }

  /// By all threads, behind a sync, when the warps have counted: finds what each block and warp has before it, and the
  /// totals. Blocks tell each other in `exchange`; one that is alone needs none. `await_others()` returns when
  /// exchange.counted has this call's number, or false after a fault.
  template <class AwaitOthers>
  DEEP_EP_DEVICE bool add(const CountExchange& exchange, std::uint64_t call, std::int32_t* scratch,
                          AwaitOthers await_others) const {
    block::each(columns, [&](int column) {
      const std::int32_t count = add_warps(column);
      shared.before[column] = 0;
      shared.totals[column] = blocks == 1 ? count : 0;
      if (blocks > 1) exchange.counts[std::int64_t{block} * columns + column] = count;
    });
    block::sync();
    if (blocks == 1) return true;
    bool good = true;
    if (thread_index() == 0) {
      if (last_to_arrive<Scope::gpu>(exchange.ticket, static_cast<std::uint32_t>(blocks))) {
        store_release<Scope::gpu>(exchange.counted, call);
      }
      good = await_others();
    }
    if (!whole_block(good, scratch)) return false;
#pragma unroll 1
    for (int column = lane_index(); column < columns; column += kWarpSize) add_blocks(exchange.counts, column);
    block::sync();
    return true;
  }

  /// By a whole warp: the next numbers of a column, whose numbers begin with `start`, for the lanes that want one, in
  /// their order.
  DEEP_EP_DEVICE std::int32_t take(int column, std::int32_t start, bool wanted) const {
    std::int32_t* const next = own();
    const std::uint32_t same = warp::match_any(wanted ? static_cast<std::uint32_t>(column) : ~0u);
    const std::uint32_t earlier = same & ((1u << lane_index()) - 1);
    const std::int32_t number = wanted ? start + shared.before[column] + next[column] + count_bits(earlier) : -1;
    warp::sync();
    if (wanted && earlier == 0) next[column] += count_bits(same);
    warp::sync();
    return number;
  }

 private:
  /// By a thread: adds up what the warps have counted, each finds what those before it have.
  DEEP_EP_DEVICE std::int32_t add_warps(int column) const {
    constexpr int kTogether = 8;
    std::int32_t sum = 0;
#pragma unroll 1
    for (int first = 0; first < warps; first += kTogether) {
      std::int32_t count[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i < warps) count[i] = shared.next[(first + i) * columns + column];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= warps) break;
        shared.next[(first + i) * columns + column] = sum;
        sum += count[i];
      }
    }
    return sum;
  }

  /// By a lane of each warp: warps share the blocks, whose counts they load in groups.
  DEEP_EP_DEVICE void add_blocks(const std::int32_t* counts, int column) const {
    std::int32_t before = 0, total = 0;
#pragma unroll 4
    for (int other = warp_index(); other < blocks; other += block_warps()) {
      const std::int32_t count = load_weak(counts + std::int64_t{other} * columns + column);
      total += count;
      before += other < block ? count : 0;
    }
    add_relaxed<Scope::block>(&shared.before[column], before);
    add_relaxed<Scope::block>(&shared.totals[column], total);
  }
};

// Tables of a handle.

DEEP_EP_DEVICE std::int32_t rounded_up(std::int32_t count, int alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

/// By one warp: each expert's rows begin behind those of the experts before, rounded up.
DEEP_EP_DEVICE void find_starts(const std::int32_t* counts, int num_experts, int alignment, std::int32_t* starts) {
  std::int32_t start = 0;
#pragma unroll 1
  for (int first = 0; first < num_experts; first += kWarpSize) {
    const int expert = first + lane_index();
    const std::int32_t rows = expert < num_experts ? rounded_up(counts[expert], alignment) : 0;
    const std::int32_t end = start + warp::inclusive_sum(rows);
    if (expert < num_experts) starts[expert] = end - rows;
    start = warp::shuffle(end, kWarpSize - 1);
  }
}

/// By a thread: what is said of an expert whose rows begin at `start`.
DEEP_EP_DEVICE void write_expert(const RowTables& tables, int expert, std::int32_t count, std::int32_t start,
                                 int alignment) {
  tables.expert_counts[expert] = count;
  tables.expert_ends[expert] = start + (tables.expand ? count : rounded_up(count, alignment));
  if (tables.stats != nullptr) tables.stats[expert] += count;
}

/// By a thread: every `step`-th row from `first` on holds nothing.
DEEP_EP_DEVICE void clear_rows(const RowTables& tables, std::int64_t first, std::int64_t step) {
  const int num_topk = tables.metadata.num_topk;
#pragma unroll 1
  for (std::int64_t row = first; row < tables.metadata.num_rows; row += step) {
#pragma unroll 1
    for (int column = 0; column < RowMetadata::kColumnsBefore + num_topk; ++column) {
      tables.metadata.row(row)[column] = -1;
    }
#pragma unroll 1
    for (int k = 0; k < num_topk; ++k) tables.local[row * num_topk + k] = -1;
  }
}

}  // namespace deep_ep::device
