// The forwarding warps of dispatch: they load rows that have landed from other nodes, each once, and store them into
// their final places on the ranks of this node.
#pragma once

#include "kernels/internode/dispatch_spread.hpp"

namespace deep_ep::device::internode {

struct DispatchForwarder {
  RowSpreader& to;
  std::int32_t* next;  ///< [other nodes], of the warp

  DEEP_EP_DEVICE const TransferParams& transfer() const { return to.params.transfer; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return to.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return to.rings(); }
  DEEP_EP_DEVICE int rows_from(int number) const { return transfer().counts.from_node[grid().other(number)]; }
  DEEP_EP_DEVICE PackedRow slot(int number, int row) const {
    return {rings().landing(number, row).in(transfer().common.own_heap()), to.params.rows};
  }

  /// For combine: where row number `relayed` of those that came from other nodes has gone.
  DEEP_EP_DEVICE void note_places(const SlotRow& row, std::int64_t relayed) const {
    if (!to.params.send_src_idx || relayed >= transfer().relay_rows_room) return;
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      to.params.relay_rows[relayed * grid().width + index] = to.final_place(row, index);
    }
  }

  // A warp takes a share of a chunk at a time: with whole chunks, one warp would forward all of the last one.

  DEEP_EP_DEVICE bool forward(int number, int share) const {
    const int chunk = share / rings().shares;
    const int in_chunk = share % rings().shares * Rings::kShareRows;
    const int left = rings().rows_in(chunk, rows_from(number)) - in_chunk;
    if (left <= 0) return true;  // of a last chunk that is not full
    const int rows = left < Rings::kShareRows ? left : Rings::kShareRows;
    const int begin = chunk * rings().chunk_rows + in_chunk;
    bulk::fence_global();  // the chunk has landed: bulk loads may read it
    to.load(slot(number, begin).at, 0);
    // While the row is loading. The shape arrived before any row; each warp compares it for itself. A warp drops rows
    // of another shape, as they would name places of other rows; the poster puts the fault on record.
    const std::uint64_t theirs = load_relaxed<Scope::system>(shape_of(transfer(), number, rings().lane_of(chunk)));
    if (!shapes_agree(expected_shape(transfer(), to.call, number), theirs)) {
      to.pipe.drop();
    } else {
      const std::int64_t relayed = rows_before(grid(), transfer().counts.from_node, number);
      for (int at = begin; at < begin + rows; ++at) {
        SlotRow row{slot(number, at)};
        row.place = to.place_at(row, lane_index());
        note_places(row, relayed + at);
        const auto load_next = [&] {
          if (at + 1 < begin + rows) to.load(slot(number, at + 1).at, 0);
        };
        if (!to.spread(row, load_next, [] { return true; })) return false;
      }
    }
    // All of it is in shared memory or in registers: the slots may be written again.
    warp::sync();
    if (lane_index() == 0) {
      fetch_add_release<Scope::gpu>(transfer().common.read + rings().counter(number, chunk),
                                    static_cast<std::uint32_t>(rows));
    }
    return true;
  }

  /// Forwards this warp's shares, which are every `step`th one. False after a fault.
  DEEP_EP_DEVICE bool forward_all(int first, int step) const {
    const auto landed = [&](int number, int share) {
      return landed_through(transfer(), to.call, number, share / rings().shares);
    };
    const bool good = serve(
        grid().others(), transfer().wait, next, first, step,
        [&](int number) { return rings().chunks_for(rows_from(number)) * rings().shares; },
        [&](int number) { return landed(number, next[number]).is_reached(); },
        [&](int number, int share) { return forward(number, share); }, landed);
    bulk::wait<0>();
    bulk::fence_global();
    return good;
  }
};

}  // namespace deep_ep::device::internode
