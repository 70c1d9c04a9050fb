// The rows that the dispatch brought, as the expert side of combine goes through them.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

/// A received row, as a warp remembers it.
struct CombineRow {
  int source, index;
  std::int32_t rows;      ///< of the source; this one is there if `index` is below
  std::int32_t token;     ///< at the source
  std::int32_t position;  ///< in each lane that of a selection, negative: not on this rank
};

/// Groups of warps take the rows in turn. Neighbouring rows belong to different owners, so that all links are busy at
/// once.
struct ReceivedRows {
  const LowLatencyCombineParams& params;
  int group, groups;  ///< in the block

  DEEP_EP_DEVICE LowLatencyRowTable table() const {
    return {const_cast<std::int32_t*>(params.row_table), params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * params.common.working_blocks + block_index(); }
  DEEP_EP_DEVICE int step() const { return groups * params.common.working_blocks; }

  /// The most rows that this lane's sources have.
  DEEP_EP_DEVICE std::int32_t most_rows() const {
    const int ranks = params.common.num_ranks;
    std::int32_t most = lane_index() < ranks ? load_stream(table().rows(lane_index())) : 0;  // nothing waits for it yet
#pragma unroll 1
    for (int source = lane_index() + kWarpSize; source < ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(table().rows(source));
      most = rows > most ? rows : most;
    }
    return most;
  }

  /// Loads what the table says of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const Divisor& ranks = params.common.num_ranks;
    CombineRow row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in a different order each time: otherwise a group could always meet the same one.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_stream(table().rows(row.source));
    row.token = load_stream(table().token(row.source, row.index));
    row.position = -1;
    if (params.rank_major) {
      if (lane_index() == 0) row.position = row.source * params.max_tokens + row.index;
    } else if (lane_index() < params.num_topk) {
      row.position = load_stream(table().position(row.source, row.index, lane_index()));
    }
    return row;
  }
};

}  // namespace deep_ep::device::low_latency
