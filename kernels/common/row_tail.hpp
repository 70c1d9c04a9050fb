// Worst-case sizes: the rows that nobody fills.
#pragma once

#include "kernels/common/rows.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// By all threads of the grid: rows from `received` to `end` have no experts.
DEEP_EP_DEVICE void fill_tail(const RowTargets& rows, const RowShape& shape, std::int64_t received, std::int64_t end) {
  for (std::int64_t i = received * shape.num_topk + block_index() * block_threads() + thread_index();
       i < end * shape.num_topk; i += grid_blocks() * block_threads()) {
    store_topk_index(rows.topk_idx, shape.topk_idx_is_64_bit, i, -1);
  }
}

}  // namespace deep_ep::device
