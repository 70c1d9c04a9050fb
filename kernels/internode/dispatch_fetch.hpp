// The fetching warps of dispatch, on a rank whose output the heap had no room for: the ranks of its node store its rows
// in its local rings, and these warps copy them to their final places. They wait for no rank that might wait for them.
#pragma once

#include "kernels/internode/dispatch_rows.hpp"

namespace deep_ep::device::internode {

struct DispatchFetcher {
  const InternodeDispatchParams& params;
  std::uint64_t call;
  const std::int32_t* rows;  ///< [width]: how many each rank of this node stores
  std::int32_t* next;        ///< [width], of the warp

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE TokenRing ring(int writer) const { return {params.transfer, call, writer, writer, grid().index()}; }

  /// Rows that rank `writer` of this node stores in our local ring: its own, and those of its rails.
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
    const SlotRow row{{ring(writer).slot(n), params.rows}};
    const RowTargets::Row to = params.output.row(params.rows, row.place_of(grid().node(), grid().index()));
    Sidecar(params, row).store(to, grid().rank);
    copy_row(to.x(), row.x(), params.rows.row_bytes);
    warp::sync();  // all lanes have read it
    if (lane_index() == 0) ring(writer).release(n);
  }

  /// Fetches this warp's rows, which are every `step`th one of each writer. False after a fault.
  DEEP_EP_DEVICE bool fetch_all(int first, int step) const {
    return serve(
        grid().width, params.transfer.wait, next, first, step, [&](int writer) { return rows[writer]; },
        [&](int writer) { return ring(writer).row(next[writer]).is_reached(); },
        [&](int writer, std::int32_t n) {
          fetch(writer, n);
          return true;
        },
        [&](int writer, std::int32_t n) { return ring(writer).row(n); });
  }
};

}  // namespace deep_ep::device::internode
