// Senders and forwarders of dispatch spread rows: a warp loads each row once into shared memory, and stores it from
// there.
#pragma once

#include "kernels/common/row_pipe.hpp"
#include "kernels/internode/dispatch_rows.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::internode {

/// Spreads a warp's rows to destinations: the ranks of this node, by index, and, for a row of this rank, the other
/// nodes, by number.
struct RowSpreader {
  const InternodeDispatchParams& params;
  const NodeTarget* targets;
  std::uint64_t call;
  RowPipe pipe;
  bool by_rings;  ///< some rank of this node gets its rows by its local rings

  DEEP_EP_DEVICE RowSpreader(const InternodeDispatchParams& dispatch, const NodeTarget* node_targets,
                             std::uint64_t number, const RowPipe& row_pipe)
      : params(dispatch), targets(node_targets), call(number), pipe(row_pipe), by_rings(false) {
    for (int index = lane_index(); index < grid().width; index += kWarpSize) by_rings |= targets[index].by_ring;
    by_rings = warp::any(by_rings);
  }

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE const Rings& rings() const { return params.transfer.rings; }
  DEEP_EP_DEVICE bool is_node(int destination) const { return destination >= grid().width; }
  template <class Row>
  DEEP_EP_DEVICE int destinations(const Row&) const {
    return grid().width + (Row::kForAllNodes ? grid().others() : 0);
  }

  /// The row's final place at rank `index` of this node; -1: none.
  template <class Row>
  DEEP_EP_DEVICE std::int32_t final_place(const Row& row, int index) const {
    if (index >= grid().width) return -1;
    const std::int32_t place = row.place_of(grid().node(), index);
    return place < targets[index].capacity ? place : -1;
  }
  /// The same if it goes there by a local ring.
  template <class Row>
  DEEP_EP_DEVICE std::int32_t place_by_ring(const Row& row, int index) const {
    return index < grid().width && targets[index].by_ring ? final_place(row, index) : -1;
  }
  /// The place to which the warp stores the row: its final place at a rank, its number among the rows for a node; -1:
  /// none.
  template <class Row>
  DEEP_EP_DEVICE std::int32_t place_at(const Row& row, int destination) const {
    if (destination >= destinations(row)) return -1;
    if constexpr (Row::kForAllNodes) {
      if (is_node(destination)) return row.number_for(grid().other(destination - grid().width));
    }
    return targets[destination].by_ring ? -1 : final_place(row, destination);
  }
  DEEP_EP_DEVICE std::byte* staging_slot(int destination, std::int32_t place) const {
    return rings().staging(destination - grid().width, place).in(params.transfer.common.own_heap());
  }

  /// Calls `use(destination, place)` for each of this lane's destinations.
  template <class Row, class Use>
  DEEP_EP_DEVICE void for_each(const Row& row, Use use) const {
    std::int32_t place = row.place;
    for (int destination = lane_index();;) {
      if (place >= 0) use(destination, place);
      destination += kWarpSize;
      if (destination >= destinations(row)) break;
      place = place_at(row, destination);
    }
  }

  DEEP_EP_DEVICE void load(const std::byte* x, std::uint32_t offset) {
    const std::uint32_t rest = params.rows.row_bytes - offset;
    pipe.load(x + offset, rest < pipe.stage_bytes ? rest : pipe.stage_bytes);
  }

  /// By the whole warp: what travels beside the row.
  template <class Row>
  DEEP_EP_DEVICE void store_sidecars(const Row& row) const {
    const Sidecar sidecar(params, row);
    for (int first = 0; first < destinations(row); first += kWarpSize) {
      const std::int32_t mine = first == 0 ? row.place : place_at(row, first + lane_index());
      for (std::uint32_t left = warp::ballot(mine >= 0); left != 0; left &= left - 1) {
        const int destination = first + lowest_bit(left);
        const std::int32_t place = warp::shuffle(mine, lowest_bit(left));
        if (Row::kForAllNodes && is_node(destination)) {
          sidecar.pack({staging_slot(destination, place), params.rows}, grid().other(destination - grid().width));
        } else {
          // A copy: the original is in shared memory, and for all the compiler knows each store here changes it.
          const RowTargets rows = targets[destination].rows;
          sidecar.store(rows.row(params.rows, place), grid().first_of_node() + destination);
        }
      }
    }
  }

  /// By the whole warp: stores the row in the local rings that it goes by. False after a fault.
  ///
  /// A warp takes a number only when it has stored what it took before, so the oldest number not stored waits for
  /// nothing but the receiver, which takes rows as they come.
  template <class Row>
  DEEP_EP_DEVICE bool store_in_rings(const Row& row) const {
    for (int first = 0; first < grid().width; first += kWarpSize) {
      const bool mine = place_by_ring(row, first + lane_index()) >= 0;
      for (std::uint32_t left = warp::ballot(mine); left != 0; left &= left - 1) {
        const int to = first + lowest_bit(left);
        const TokenRing ring{params.transfer, call, to, to, grid().index()};
        const auto n = static_cast<std::int32_t>(take_next(params.transfer.common.local_tickets + to));
        if (!ring.acquire(n)) return false;
        bulk::fence_global();  // bulk stores come behind what the warp has acquired
        copy_row(ring.slot_there(n), row.x(), params.rows.row_bytes);
        Sidecar(params, row).pack({ring.slot_there(n), params.rows}, grid().node());
        ring.publish(n);
      }
    }
    return true;
  }

  /// Begins to store the row, whose first piece is loading. `load_next()` begins to load the first piece of the row
  /// behind it, if there is one; `may_store()` waits for the row's slots. False after a fault.
  template <class Row, class LoadNext, class MayStore>
  DEEP_EP_DEVICE bool spread(const Row& row, LoadNext load_next, MayStore may_store) {
    for (std::uint32_t offset = 0; offset < params.rows.row_bytes; offset += pipe.stage_bytes) {
      const std::uint32_t rest = params.rows.row_bytes - offset;
      if (rest > pipe.stage_bytes) {
        load(row.x(), offset + pipe.stage_bytes);
      } else {
        load_next();
      }
      if (offset == 0) {
        if (!may_store() || (by_rings && !store_in_rings(row))) {
          pipe.drop();
          return false;
        }
        store_sidecars(row);
      }
      pipe.store(rest < pipe.stage_bytes ? rest : pipe.stage_bytes, [&](auto store) {
        for_each(row, [&](int destination, std::int32_t place) {
          store((Row::kForAllNodes && is_node(destination) ? staging_slot(destination, place)
                                                           : targets[destination].rows.row(params.rows, place).x()) +
                offset);
        });
      });
    }
    return true;
  }
};

}  // namespace deep_ep::device::internode
