// The weighted sum of rows of x into a stage, by a group of warps.
//
// A thread has as many loads under way at once as registers allow: vectors of one row, or the same vector of several.
// The first of them are on their way before the owner's word has come that these rows are wanted at all; it nearly
// always wants what it dispatched.
#pragma once

#include "kernels/low_latency/combine_shared.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

DEEP_EP_DEVICE void add_weighted(float (&sum)[8], const Vec16& vector, float weight) {
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, bf16_low(vector.word[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, bf16_high(vector.word[i]), sum[2 * i + 1]);
  }
}

struct RowSummer {
  const Vec16* x;
  int vectors;  ///< of a row
  Vec16* stage;
  int thread, threads;  ///< of the group
  const CombineChoice& choice;

  /// `position`: in each lane the row of one selection, negative for none. The sum is in the order of the lanes.
  /// `meet()` waits for the choice; before that, rows are only loaded. False when the choice is another than
  /// `position`: nothing has been done.
  template <class Meet>
  DEEP_EP_DEVICE bool sum(std::int32_t position, Meet meet) const {
    const std::uint32_t holders = warp::ballot(position >= 0);
    const int rows = count_bits(holders);
    if (rows <= 1) return sum_rows<1, 8>(position, holders, meet);
    if (rows == 2) return sum_rows<2, 4>(position, holders, meet);
    if (rows <= 4) return sum_rows<4, 2>(position, holders, meet);
    return sum_rows<8, 1>(position, holders, meet);
  }

 private:
  DEEP_EP_DEVICE const Vec16* row(std::int32_t position) const { return x + std::int64_t{position} * vectors; }

  template <int kRows, int kVectors, class Meet>
  DEEP_EP_DEVICE bool sum_rows(std::int32_t position, std::uint32_t holders, Meet meet) const {
    const int rows = count_bits(holders);
    std::int32_t at[kRows];
    for (int i = 0; i < kRows; ++i) {
      at[i] = holders == 0 ? -1 : warp::shuffle(position, lowest_bit(holders));
      if (holders != 0) holders &= holders - 1;
    }
    for (int first = 0; first < vectors; first += kVectors * threads) {
      Vec16 loaded[kRows][kVectors];
      for (int i = 0; i < kRows; ++i) {
        for (int v = 0; v < kVectors; ++v) {
          const int vector = first + v * threads + thread;
          if (at[i] >= 0 && vector < vectors) loaded[i][v] = load_stream(row(at[i]) + vector);
        }
      }
      if (first == 0 && !meet()) return false;
      for (int v = 0; v < kVectors; ++v) {
        const int vector = first + v * threads + thread;
        if (vector >= vectors) continue;
        float sum[8] = {};
        for (int i = 0; i < kRows; ++i) {
          if (at[i] >= 0) add_weighted(sum, loaded[i][v], choice.weight[i]);
        }
        for (int i = kRows; i < rows; ++i) {
          add_weighted(sum, load_stream(row(choice.position[i]) + vector), choice.weight[i]);
        }
        stage[vector] = pack_sum(sum);
      }
    }
    return true;
  }
};

}  // namespace deep_ep::device::low_latency
