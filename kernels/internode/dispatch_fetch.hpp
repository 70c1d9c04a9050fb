// The fetching warps of dispatch, on a rank whose output the heap had no room for: the ranks of its node store its rows
// in its near window, and these warps copy them to their final places. They wait for nobody who might wait for them.
#pragma once

#include "kernels/internode/dispatch_shared.hpp"
#include "kernels/internode/serving.hpp"

namespace deep_ep::device::internode {

struct DispatchFetcher {
  const InternodeDispatchParams& params;
  NearQueues queues;         ///< by writers
  const std::int32_t* rows;  ///< [width]: how many each of them stores
  std::int32_t* next;        ///< [width], of the warp

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }

  /// Rows that rank `writer` of this node stores in our near window: its own, and those of its rails.
  DEEP_EP_DEVICE static std::int32_t rows_by(const InternodeDispatchParams& params, int writer) {
    const NodeGrid& grid = params.transfer.common.grid;
    const auto clip = [&](std::int32_t end) { return end < params.output_rows ? end : params.output_rows; };
    std::int64_t rows = 0;
    for (int node = 0; node < grid.nodes(); ++node) {
      const int source = node * grid.width + writer;
      const std::int32_t end = params.rank_prefix_matrix[source * grid.num_ranks + grid.rank];
      const std::int32_t begin =
          end - deep_ep::rows_between(params.rank_prefix_matrix, grid.num_ranks, source, grid.rank);
      rows += clip(end) - clip(begin);
    }
    return static_cast<std::int32_t>(rows);
  }

  DEEP_EP_DEVICE void fetch(int writer, std::int32_t n) const {
    const PackedRow packed{queues.slot(writer, n), params.rows};
    const RowTargets::Row to = params.output.row(params.rows, load_weak(packed.rows() + grid().index()));
    store_sidecar(params, unpack_sidecar(packed), to, grid().rank,
                  [&](int at) { return load_weak(packed.scales() + at); });
    copy_row(to.x(), packed.at, params.rows.row_bytes);
    warp::sync();  // all lanes have read it
    if (lane_index() == 0) queues.empty(writer, grid().index(), n);
  }

  /// Fetches this warp's rows, which are every `step`th one of each writer. False after a fault.
  DEEP_EP_DEVICE bool fetch_all(int first, int step) const {
    return serve(
        grid().width, params.transfer.wait, next, first, step, [&](int writer) { return rows[writer]; },
        [&](int writer) { return queues.is_filled(writer, next[writer]) ? next[writer] + 1 : 0; },
        [&](int writer, std::int32_t n) {
          fetch(writer, n);
          return true;
        },
        [&](int writer, std::int32_t n, auto is_late) {
          const int peer = grid().first_of_node() + writer;
          if (!is_late(peer, Wanted::internode_near_rows)) return false;
          report_fault(params.transfer.wait, FaultKind::timeout, Wanted::internode_near_rows, peer, 0,
                       queues.progress(n), load_relaxed<Scope::system>(queues.filled(writer, n)));
          return true;
        });
  }
};

}  // namespace deep_ep::device::internode
