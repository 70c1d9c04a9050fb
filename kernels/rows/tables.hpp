// Tables of a handle, as every kernel that numbers rows writes them.
#pragma once

#include <cstdint>

#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE std::int32_t rounded_up(std::int32_t count, int alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

/// By one warp: each expert's rows begin behind those of the experts before, rounded up.
DEEP_EP_DEVICE void find_starts(const std::int32_t* counts, int num_experts, int alignment, std::int32_t* starts) {
  std::int32_t start = 0;
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
  for (std::int64_t row = first; row < tables.metadata.num_rows; row += step) {
    for (int column = 0; column < RowMetadata::kColumnsBefore + num_topk; ++column) {
      tables.metadata.row(row)[column] = -1;
    }
    for (int k = 0; k < num_topk; ++k) tables.local[row * num_topk + k] = -1;
  }
}

}  // namespace deep_ep::device
