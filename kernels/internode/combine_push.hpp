// The pushing warps of combine, on a rank whose rows lie outside the heap: they store them in the near windows of the
// ranks of their node, in the order in which these add them up. They take whichever queue has room and never wait for
// one: what it waits for may wait for another.
#pragma once

#include "kernels/internode/combine_rows.hpp"

namespace deep_ep::device::internode {

struct CombinePusher {
  const InternodeCombineParams& params;
  PushedRows pushed;
  const std::int32_t* rows;  ///< [num_ranks]: how many go by each queue
  std::int32_t* next;        ///< [num_ranks], of the warp

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE int index_of(int queue) const { return queue / grid().nodes(); }
  DEEP_EP_DEVICE int node_of(int queue) const { return queue % grid().nodes(); }
  /// The first of our rows that goes by the queue: those of one source follow each other, by token.
  DEEP_EP_DEVICE std::int32_t first_row(int queue) const {
    return pushed.first_row(node_of(queue) * grid().width + index_of(queue), grid().rank);
  }

  DEEP_EP_DEVICE std::int32_t rows_of(int queue) const {
    const int source = node_of(queue) * grid().width + index_of(queue);
    const std::int32_t begin = first_row(queue);
    const std::int32_t end = params.rank_prefix_matrix[source * grid().num_ranks + grid().rank];
    const std::int32_t held = end < params.num_rows ? end : params.num_rows;
    return begin < held ? held - begin : 0;
  }

  DEEP_EP_DEVICE void push(int queue, std::int32_t n) const {
    const std::int64_t row = std::int64_t{first_row(queue)} + n;
    const int theirs = pushed.queue(grid().index(), node_of(queue));
    std::byte* slot = pushed.queues.slot_at(index_of(queue), theirs, n);
    copy_row(slot, params.x + row * params.row_bytes, params.row_bytes);
    if (lane_index() < params.num_topk) {
      reinterpret_cast<float*>(slot + params.row_bytes)[lane_index()] =
          load_weak(params.topk_weights + row * params.num_topk + lane_index());
    }
    pushed.queues.fill(index_of(queue), theirs, n);
  }

  /// Pushes this warp's rows, which are every `step`th one of each queue. False after a fault.
  DEEP_EP_DEVICE bool push_all(int first, int step) const {
    return serve(
        grid().num_ranks, params.transfer.wait, next, first, step, [&](int queue) { return rows[queue]; },
        [&](int queue) { return pushed.queues.has_room(queue, next[queue]) ? next[queue] + 1 : 0; },
        [&](int queue, std::int32_t n) {
          push(queue, n);
          return true;
        },
        [&](int queue, std::int32_t n, auto is_late) {
          const int peer = grid().first_of_node() + index_of(queue);
          if (!is_late(peer, Wanted::internode_near_room)) return false;
          report_fault(params.transfer.wait, FaultKind::timeout, Wanted::internode_near_room, peer, 0,
                       pushed.queues.progress(n - params.transfer.near.slots),
                       load_relaxed<Scope::system>(pushed.queues.emptied(queue, n)));
          return true;
        });
  }
};

}  // namespace deep_ep::device::internode
