// The weighted sum of rows of x into a stage, by a group of warps.
//
// A thread has as many loads under way at once as registers allow, whether they are many vectors of one row or few of
// many. The first of them are on their way before the owner's word has come that these rows are wanted at all; it
// nearly always wants what it dispatched.
#pragma once

#include "kernels/low_latency/combine_shared.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

DEEP_EP_DEVICE void add_weighted(float (&sum)[8], const Vec16& vector, float weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, bf16_low(vector.word[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, bf16_high(vector.word[i]), sum[2 * i + 1]);
  }
}

struct RowSummer {
  static constexpr int kTogether = 8;  ///< loads of a thread that are under way at once

  const Vec16* x;
  int vectors;          ///< of a row
  int thread, threads;  ///< of the group

  /// `position`: in each lane the row of one selection that the dispatch brought, negative for none. `meet()` waits for
  /// `choice`; before that, rows are only loaded. The sum is in the order of the lanes or, where others were chosen, of
  /// the choice.
  template <class Meet>
  DEEP_EP_DEVICE void sum(std::int32_t position, const CombineChoice& choice, Vec16* to, Meet meet) const {
    bool met = false;
    for (bool again = true; again;) {
      again = false;
      const std::uint32_t rows = warp::ballot(position >= 0);
      const int num_rows = count_bits(rows);
      const int pieces = (vectors + threads - 1) / threads * num_rows;

      // Vector by vector, and row by row within one: what is loaded next, and what is added next.
      std::uint32_t rows_to_load = rows;
      int vector_to_load = thread;
      int row_to_add = 0;
      int vector_to_add = thread;
      float sum[8] = {};
      int piece = 0;
      do {
        Vec16 loaded[kTogether] = {};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (piece + i >= pieces) continue;
          const Vec16* row = x + std::int64_t{warp::shuffle(position, lowest_bit(rows_to_load))} * vectors;
          if (vector_to_load < vectors) loaded[i] = load_stream(row + vector_to_load);
          rows_to_load &= rows_to_load - 1;
          if (rows_to_load != 0) continue;
          rows_to_load = rows;
          vector_to_load += threads;
        }
        if (!met) {
          met = true;
          meet();
          again = choice.kind == CombineChoice::others;
          if (choice.kind != CombineChoice::as_dispatched) break;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (piece + i >= pieces) continue;
          add_weighted(sum, loaded[i], choice.weight[row_to_add]);
          if (++row_to_add != num_rows) continue;
          if (vector_to_add < vectors) to[vector_to_add] = pack_sum(sum);
          for (float& part : sum) part = 0.0f;
          row_to_add = 0;
          vector_to_add += threads;
        }
        piece += kTogether;
      } while (piece < pieces);
      if (again) position = lane_index() < choice.count ? choice.position[lane_index()] : -1;
    }
  }
};

}  // namespace deep_ep::device::low_latency
