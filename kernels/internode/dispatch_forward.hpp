// The forwarding warps of dispatch: they load rows that have landed from other nodes, each once, and store them into
// their final places on the ranks of this node.
#pragma once

#include "kernels/common/row_pipe.hpp"
#include "kernels/internode/dispatch_shared.hpp"
#include "kernels/internode/serving.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::internode {

template <bool kLanes>
struct DispatchForwarder {
  const InternodeDispatchParams& params;
  const NodeTarget* targets;
  std::uint64_t call;
  RowPipe pipe;
  std::int32_t* next;  ///< [other nodes], of the warp
  bool near;           ///< some rank of this node gets its rows by its near window
  /// The rows in hand are laid out as this rank takes them to be. Where they are not, a posting lane puts it on record,
  /// and they go nowhere: read as something else, they would name places of other rows.
  bool understood = true;

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE const Rings& rings() const { return params.transfer.rings; }
  DEEP_EP_DEVICE int rows_from(int number) const { return params.transfer.counts.from_node[grid().other(number)]; }
  DEEP_EP_DEVICE std::byte* slot(int number, int row) const {
    return rings().landing(number, row).in(params.transfer.common.own_heap());
  }

  struct Unit {
    int row;  ///< of its node
    std::uint32_t offset;
  };

  DEEP_EP_DEVICE std::uint32_t bytes_of(const Unit& unit) const {
    const std::uint32_t left = params.rows.row_bytes - unit.offset;
    return left < pipe.stage_bytes ? left : pipe.stage_bytes;
  }
  DEEP_EP_DEVICE Unit after(const Unit& unit) const {
    const std::uint32_t offset = unit.offset + pipe.stage_bytes;
    return offset < params.rows.row_bytes ? Unit{unit.row, offset} : Unit{unit.row + 1, 0};
  }
  DEEP_EP_DEVICE void load(int number, const Unit& unit) {
    pipe.load(slot(number, unit.row) + unit.offset, bytes_of(unit));
  }

  /// Where the row goes at rank `index` of this node; -1: nowhere, there is no room for it, or it is unknown.
  DEEP_EP_DEVICE std::int32_t place_at(const PackedRow& packed, int index) const {
    if (index >= grid().width) return -1;
    const std::int32_t row = load_weak(packed.rows() + index);
    return understood && row < targets[index].capacity ? row : -1;
  }

  /// The same where it goes by the rank's near window.
  DEEP_EP_DEVICE std::int32_t near_place_at(const PackedRow& packed, int index) const {
    if (index >= grid().width) return -1;
    const std::int32_t row = load_weak(packed.rows() + index);
    return understood && row < targets[index].near_capacity ? row : -1;
  }

  DEEP_EP_DEVICE void store_sidecars(const PackedRow& packed, int row, std::int64_t relayed) const {
    const RowShape& shape = params.rows;
    const auto scale = [&](int at) { return load_weak(packed.scales() + at); };
    const Sidecar sidecar = unpack_sidecar(packed);
    for (int first = 0; first < grid().width; first += kWarpSize) {
      const int index = first + lane_index();
      const std::int32_t mine = place_at(packed, index);
      if (params.send_src_idx && relayed + row < params.transfer.relay_rows_room && index < grid().width) {
        params.relay_rows[(relayed + row) * grid().width + index] =
            near && mine < 0 ? near_place_at(packed, index) : mine;
      }
      for (std::uint32_t left = warp::ballot(mine >= 0); left != 0; left &= left - 1) {
        const int to = first + lowest_bit(left);
        const RowTargets rows = targets[to].rows;  // a copy, see DispatchSender
        store_sidecar(params, sidecar, rows.row(shape, warp::shuffle(mine, lowest_bit(left))),
                      grid().first_of_node() + to, scale);
      }
    }
  }

  /// By the whole warp: to the near windows that the row goes by. False after a fault.
  DEEP_EP_DEVICE bool send_to_near_windows(const PackedRow& packed) const {
    return send_near(
        params.transfer, call, [&](int index) { return near_place_at(packed, index) >= 0; },
        [&](std::byte* slot) { copy_row(slot, packed.at, rings().slot_bytes); });
  }

  /// Tokens that come from the nodes before: where this one's begin in relay_rows, which goes by node.
  DEEP_EP_DEVICE std::int64_t rows_before(int number) const {
    std::int64_t before = 0;
    for (int node = 0; node < grid().other(number); ++node) {
      if (node != grid().node()) before += params.transfer.counts.from_node[node];
    }
    return before;
  }

  // A warp takes a few rows at a time: with whole chunks, the last one would be in the hands of one warp.

  static constexpr int kShareRows = Rings::kShareRows;

  DEEP_EP_DEVICE const Divisor& shares_of_chunk() const { return rings().shares; }

  DEEP_EP_DEVICE bool has_landed(int number, int chunk) const {
    return in_lane<kLanes>(rings(), chunk) <
           landed_chunks(params.transfer, call, number, lane_of<kLanes>(rings(), chunk));
  }

  DEEP_EP_DEVICE bool forward(int number, int share) {
    const int chunk = share / shares_of_chunk();
    const int in_chunk = share % shares_of_chunk() * kShareRows;
    const int left = rings().rows_in(chunk, rows_from(number)) - in_chunk;
    if (left <= 0) return true;  // of a last chunk that is not full
    const int rows = left < kShareRows ? left : kShareRows;
    bulk::fence_global();  // the chunk has landed: bulk loads may read it
    const std::int64_t relayed = rows_before(number);
    const int begin = chunk * rings().chunk_rows + in_chunk;
    Unit unit{begin, 0};
    load(number, unit);
    // While the row comes. The shape arrived before any row; all warps look for themselves.
    understood =
        shapes_agree(expected_shape(params.transfer, call, number),
                     load_relaxed<Scope::system>(shape_of(params.transfer, number, lane_of<kLanes>(rings(), chunk))));
    while (unit.row < begin + rows) {
      const Unit following = after(unit);
      if (following.row < begin + rows) load(number, following);
      const PackedRow packed{slot(number, unit.row), params.rows};
      if (unit.offset == 0) {
        store_sidecars(packed, unit.row, relayed);
        if (near && !send_to_near_windows(packed)) {
          pipe.drop();
          return false;
        }
      }
      pipe.store(bytes_of(unit), [&](auto store) {
        for (int index = lane_index(); index < grid().width; index += kWarpSize) {
          const std::int32_t place = place_at(packed, index);
          if (place >= 0) store(targets[index].rows.row(params.rows, place).x() + unit.offset);
        }
      });
      unit = following;
    }
    // All of it is in shared memory or in registers: the slot may be written again.
    warp::sync();
    if (lane_index() == 0) {
      fetch_add_release<Scope::gpu>(params.transfer.common.read + rings().counter(number, chunk),
                                    static_cast<std::uint32_t>(rows));
    }
    return true;
  }

  /// Forwards this warp's shares, which are every `step`th one. False after a fault.
  DEEP_EP_DEVICE bool forward_all(int first, int step) {
    const bool good = serve(
        grid().others(), params.transfer.wait, next, first, step,
        [&](int number) { return rings().chunks_for(rows_from(number)) * shares_of_chunk(); },
        [&](int number) {
          if constexpr (!kLanes) return landed_chunks(params.transfer, call, number, 0) * shares_of_chunk();
          return has_landed(number, next[number] / shares_of_chunk()) ? next[number] + 1 : 0;
        },
        [&](int number, int share) { return forward(number, share); },
        [&](int number, int share, auto is_late) {
          const int rail = grid().rail_in(grid().other(number));
          if (!is_late(rail, Wanted::internode_rows)) return false;
          report_fault(params.transfer.wait, FaultKind::timeout, Wanted::internode_rows, rail, 0,
                       Rings::progress(call, in_lane<kLanes>(rings(), share / shares_of_chunk()) + 1),
                       load_relaxed<Scope::system>(
                           tail_of(params.transfer, number, lane_of<kLanes>(rings(), share / shares_of_chunk()))));
          return true;
        });
    bulk::wait<0>();
    bulk::fence_global();
    return good;
  }
};

}  // namespace deep_ep::device::internode
