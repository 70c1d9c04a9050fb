// The weighted sum of rows of x, by one warp for its share of the channels.
//
// A thread has as many loads in flight as registers allow, whether they are many vectors of one row or few of many. The
// first ones start before the owner has announced which of these rows it wants: nearly always all of them.
#pragma once

#include "kernels/low_latency/combine/wire.hpp"

namespace deep_ep::device::low_latency {

/// Which of the rows that the dispatch brought are added up for the owner.
struct CombineChoice {
  std::uint32_t rows;  ///< bit k: that of selection k
  float weight;        ///< in lane k
  bool owed;           ///< the owner waits for a row, even if it is the sum of none
};

enum class Summed { yes, nothing_chosen, not_told };

template <bool kFp8>
struct RowSummer {
  static constexpr int kTogether = 8;  ///< loads of a thread that are under way at once

  const Vec16* x;
  CombineWire wire;
  WarpShare<kFp8> share;

  /// `position`: in each lane the row of one selection that the dispatch brought, negative for none. `choose(choice)`
  /// asks for the choice; before that, rows are only loaded. The sums go into the stage; `flush(step)` is told, by the
  /// whole warp, each step from 0 on that is there.
  template <class Choose, class Flush>
  DEEP_EP_DEVICE Summed sum(std::int32_t position, std::byte* stage, Choose choose, Flush flush) const {
    CombineChoice choice{};
    bool chosen = false;
    std::uint32_t rows = warp::ballot(position >= 0);
    int pieces = share.steps(wire) * count_bits(rows);

    // Step by step, and row by row within one: what is loaded next, and what is added next.
    std::uint32_t rows_to_load = rows, rows_to_add = rows;
    int step_to_load = 0, step_to_add = 0, step_to_flush = 0;
    float sum[8] = {};
    int piece = 0;
#pragma unroll 1
    do {
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        const Vec16* row = x + std::int64_t{warp::shuffle(position, lowest_bit(rows_to_load))} * wire.vectors();
        const int vector = share.vector(wire, step_to_load);
        if (vector >= 0) loaded[i] = load_stream(row + vector);
        rows_to_load &= rows_to_load - 1;
        if (rows_to_load != 0) continue;
        rows_to_load = rows;
        ++step_to_load;
      }
      if (!chosen) {
        chosen = true;
        if (!choose(choice)) return Summed::not_told;
        if (choice.rows == 0) return choice.owed ? zero(stage, flush) : Summed::nothing_chosen;
        if (choice.rows != rows) {  // rare: begins again, with those that are wanted
          rows = rows_to_load = rows_to_add = choice.rows;
          pieces = share.steps(wire) * count_bits(rows);
          step_to_load = 0;
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        add_weighted(sum, loaded[i], warp::shuffle(choice.weight, lowest_bit(rows_to_add)));
        rows_to_add &= rows_to_add - 1;
        if (rows_to_add != 0) continue;
        if (share.vector(wire, step_to_add) >= 0) *share.staged(stage, step_to_add) = pack_sum(sum);
        for (float& part : sum) part = 0.0f;
        rows_to_add = rows;
        ++step_to_add;
      }
      piece += kTogether;
      if (step_to_flush < step_to_add) warp::sync();  // the sums are in the stage
#pragma unroll 1
      for (; step_to_flush < step_to_add; ++step_to_flush) flush(step_to_flush);
    } while (piece < pieces);
    return Summed::yes;
  }

 private:
  template <class Flush>
  DEEP_EP_DEVICE Summed zero(std::byte* stage, Flush flush) const {
#pragma unroll 1
    for (int step = 0; step < share.steps(wire); ++step) {
      if (share.vector(wire, step) >= 0) *share.staged(stage, step) = Vec16{};
      warp::sync();
      flush(step);
    }
    return Summed::yes;
  }
};

}  // namespace deep_ep::device::low_latency
