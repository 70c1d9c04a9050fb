// Which selections of received rows a block, or a warp, of count_selections and number_selections looks at. Shares are
// in order, so that selections can be numbered in order.
#pragma once

#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

struct Share {
  std::int64_t begin, end;
};

/// Part `number` of `parts` of `whole`, in multiples of `step`.
DEEP_EP_DEVICE Share part_of(const Share& whole, int number, int parts, int step) {
  const std::int64_t steps = (whole.end - whole.begin + step - 1) / step;
  const std::int64_t each = (steps + parts - 1) / parts * step;
  const std::int64_t begin = whole.begin + number * each;
  const std::int64_t end = begin + each;
  return {begin < whole.end ? begin : whole.end, end < whole.end ? end : whole.end};
}

DEEP_EP_DEVICE std::int64_t valid_rows(const NumberRowsParams& params) {
  const std::int64_t valid = load_weak(params.ends + (params.num_ranks - 1) * params.ends_stride);
  return valid < params.metadata.num_rows ? valid : params.metadata.num_rows;
}

DEEP_EP_DEVICE Share rows_of_block(const NumberRowsParams& params) {
  return part_of({0, valid_rows(params)}, block_index(), grid_blocks(), 1);
}

/// Positions in recv_topk_idx.
DEEP_EP_DEVICE Share selections_of_block(const NumberRowsParams& params) {
  const Share rows = rows_of_block(params);
  return {rows.begin * params.metadata.num_topk, rows.end * params.metadata.num_topk};
}

}  // namespace deep_ep::device
