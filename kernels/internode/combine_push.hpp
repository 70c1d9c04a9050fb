// The pushing warps of combine, on a rank whose rows lie outside the heap: they store them in the local rings of the
// ranks of their node, in the order in which these add them up. They take any ring that has room and never wait for
// one ring: its reader may wait for rows of another.
#pragma once

#include "kernels/internode/combine_rows.hpp"

namespace deep_ep::device::internode {

/// Rings are numbered by the index of their reader, then by the node of its rail whose tokens the rows are of.
struct CombinePusher {
  const InternodeCombineParams& params;
  std::uint64_t call;
  const std::int32_t* rows;  ///< [num_ranks]: how many go by each ring
  std::int32_t* next;        ///< [num_ranks], of the warp

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE TokenRing ring(int number) const {
    return LocalRows::ring(params, call, number / grid().nodes(), number % grid().nodes());
  }
  DEEP_EP_DEVICE int source_of(int number) const {
    return number % grid().nodes() * grid().width + number / grid().nodes();
  }
  /// The first of our rows that goes by a ring: those of one source follow each other, by token.
  DEEP_EP_DEVICE std::int32_t first_row(int number) const {
    return LocalRows::first_row(params, source_of(number), grid().rank);
  }

  DEEP_EP_DEVICE std::int32_t rows_of(int number) const {
    const std::int32_t begin = first_row(number);
    const std::int32_t end = params.rank_prefix_matrix[source_of(number) * grid().num_ranks + grid().rank];
    const std::int32_t held = end < params.num_rows ? end : params.num_rows;
    return begin < held ? held - begin : 0;
  }

  DEEP_EP_DEVICE void push(int number, std::int32_t n) const {
    const std::int64_t row = std::int64_t{first_row(number)} + n;
    std::byte* slot = ring(number).slot_there(n);
    copy_row(slot, params.x + row * params.row_bytes, params.row_bytes);
    if (lane_index() < params.num_topk) {
      reinterpret_cast<float*>(slot + params.row_bytes)[lane_index()] =
          load_weak(params.topk_weights + row * params.num_topk + lane_index());
    }
    ring(number).publish(n);
  }

  /// Pushes this warp's rows, which are every `step`th one of each ring. False after a fault.
  DEEP_EP_DEVICE bool push_all(int first, int step) const {
    return serve(
        grid().num_ranks, params.transfer.wait, next, first, step, [&](int number) { return rows[number]; },
        [&](int number) { return ring(number).has_room(next[number]); },
        [&](int number, std::int32_t n) {
          push(number, n);
          return true;
        },
        [&](int number, std::int32_t n) { return ring(number).room(n); });
  }
};

}  // namespace deep_ep::device::internode
