// Arguments of the kernels that number, move, address and add up rows within a device's memory. Plain data: host code
// fills it, kernels read it. deep_ep/elastic.hpp describes the tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/common/row_pipe.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/rows/window.hpp"

namespace deep_ep {

struct RowMetadata {
  static constexpr int kColumnsBefore = 2;  ///< of the selections'

  std::int32_t* data;
  std::int64_t stride;
  std::int64_t num_rows;
  Divisor num_topk;
  const std::int32_t* num_valid;  ///< on the device: how many rows hold anything

  DEEP_EP_DEVICE std::int32_t* row(std::int64_t number) const { return data + number * stride; }
  DEEP_EP_DEVICE std::int32_t* slots(std::int64_t number) const { return row(number) + kColumnsBefore; }
  DEEP_EP_DEVICE std::int64_t valid() const {
    const std::int64_t valid = device::load_weak(num_valid);
    return valid < num_rows ? valid : num_rows;
  }
};

struct SumRowsParams {
  const std::byte* rows;  ///< [num_rows] of bfloat16
  std::int64_t num_rows;
  /// There is a sum for each valid row of it, of the rows that it names. Of rows that came back it is what is beside
  /// each: token * num_topk + selection, then weights; and there is a sum for each token.
  RowMetadata metadata;
  const std::byte* bias[2];
  std::byte* sums;          ///< out; nullptr: rows go back as they are, or row_of is to be found first
  std::uint32_t row_bytes;  ///< multiple of 16
  Divisor pieces;           ///< of a row that is added, by different warps; 1 without sums
  bool each_selection;      ///< each selection's row goes back; else one for each received row

  int num_ranks;
  // Of rows that go back, the sums or those that `each_selection` says.
  Divisor max_tokens;
  const float* sent_weights;       ///< [num_rows] with `sums`, else [num_rows, num_topk]; nullptr: none
  std::int32_t* beside;            ///< out, what travels beside each; nullptr: none go
  std::uint8_t* is_token_in_rank;  ///< out, of each, [num_ranks]; 0 before

  // Of rows that came back.
  std::int32_t* row_of;  ///< [num_tokens, num_topk]: what the first launch tells the second; nullptr: none came back
  TopkIndices topk_idx;  ///< [num_tokens, num_topk]
  std::int64_t num_tokens;
  Divisor num_experts;    ///< of each rank
  std::int32_t* weights;  ///< out, bits of [num_tokens, num_topk]; nullptr: not wanted
};

/// Arguments of blocks that number selections. Columns of counters: selections of each local expert; then, with tokens
/// of all ranks, rows of this rank from each source.
struct NumberingParams {
  static constexpr int kMostWarps = 16;  ///< of a block

  // Out: what is known of the rows of a dispatch, for the handle.
  RowMetadata metadata;
  std::int32_t* local;          ///< [rows of metadata, num_topk]
  std::int32_t* source_ends;    ///< [num_ranks]
  std::int32_t* expert_ends;    ///< [num_experts]
  std::int32_t* expert_counts;  ///< [num_experts]
  std::int32_t* stats;          ///< [num_experts], added to; nullptr: not wanted
  std::int32_t* own_rows;       ///< [num_tokens, num_topk]: with tokens of all ranks, like the next one
  std::byte* selected;          ///< like topk_idx; nullptr: not wanted
  bool expand;                  ///< the metadata says where rows of the expanded layout are

  int rank;  ///< this one
  int num_ranks;
  Divisor num_experts;  ///< of each rank
  int max_tokens;       ///< of each rank
  Divisor alignment;
  std::int32_t* counts;    ///< [blocks, columns]: what blocks tell each other; one block needs none
  std::uint64_t* counted;  ///< a word of Progress: the calls in which they have done so
  Divisor blocks;          ///< the last ones of the grid
  int warps;               ///< of each of these blocks, for which shared memory has room
  Divisor all_warps;       ///< of all these blocks

  DEEP_EP_HOST_DEVICE int columns(bool of_all_ranks) const { return (of_all_ranks ? num_ranks : 0) + num_experts; }
};

/// Received rows are numbered as they lie.
struct NumberRowsParams {
  NumberingParams numbers;
  WaitContext wait;            ///< after a failed call nothing is numbered
  TopkIndices recv_topk_idx;   ///< [num_rows, num_topk]
  const std::int32_t* source;  ///< [num_rows]: token at its source
  const std::int32_t* ends;    ///< of this rank's rows, by source
  std::int64_t ends_stride;
};

struct NumberingShared {
  Carver carver;
  const NumberingParams& params;
  bool of_all_ranks;
  int columns = params.columns(of_all_ranks);
  /// [warps, columns]: what the warp counts, then the next one that it meets.
  std::int32_t* next = carver.take<std::int32_t>(params.warps * columns);
  std::int32_t* totals = carver.take<std::int32_t>(columns);
  std::int32_t* starts = carver.take<std::int32_t>(columns);  ///< the first row that this block numbers
  std::int32_t* source_ends = carver.take<std::int32_t>(params.num_ranks);
  std::size_t bytes = carver.bytes();
};

/// Words that belong to rows and keep their order; `to` nullptr: there are none.
struct KeptWords {
  std::byte* to;
  const std::byte* from;
  std::uint32_t row_bytes;  ///< multiple of 4
};

struct SpreadRowsParams {
  RowMetadata metadata;  ///< its data is read only if rows are expanded, or lie in the window of `heap`
  bool expand;
  std::int64_t num_spread;  ///< rows of the results

  /// Given: rows are not in order, but lie in the window of this heap, where the metadata says that they are from; so
  /// does what is beside them. Only those of the pass are moved.
  std::byte* heap;
  TokenWindow window;
  int rank, num_ranks;
  const std::byte* own_x;  ///< of this rank's tokens
  /// Not expanded: where rows begin (nullptr: at 0) and end that stay where they are; nullptr: none do.
  const std::int32_t* skipped[2];
  const std::uint64_t* abort;  ///< see WaitContext: after a failed call nothing is moved

  const std::byte* rows;
  std::byte* spread_rows;
  std::uint32_t row_bytes;  ///< multiple of 16

  const std::uint32_t* scales;  ///< nullptr: there are none; the same for weights
  std::int64_t scale_stride;
  int num_scales;
  std::uint32_t* spread_scales;
  std::int64_t spread_stride, spread_column_stride;

  const std::uint32_t* weights;
  std::int64_t weight_stride;
  std::uint32_t* spread_weights;  ///< [num_spread], or, not expanded, [num_rows, num_topk]

  const std::int32_t* local;  ///< [num_rows, num_topk]; nullptr: rows go without their selections
  std::byte* spread_topk_idx;
  bool indices_are_64_bit;

  KeptWords kept[3];  ///< of all rows, also those behind the valid ones, whose words mean nothing; the first is there
                      ///< if any is

  const std::int32_t* expert_ends;  ///< [num_experts], of the expanded layout; nullptr: gaps stay as they are
  int num_experts;
  Divisor alignment, sharing;  ///< warps that share a gap

  PipeShape pipe;  ///< of a warp, in shared memory
};

}  // namespace deep_ep
