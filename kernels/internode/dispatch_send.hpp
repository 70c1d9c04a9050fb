// The sending warps of dispatch. Each takes the next token, loads its row once, and stores it to every rank of this
// node that wants it, straight into its final place, and into the staging ring of every other node that does.
//
// Tokens are taken in order, and a ring's chunks are freed in order. So the oldest token that waits for room finds
// some, whatever the others wait for.
#pragma once

#include "kernels/common/row_pipe.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/internode/dispatch_shared.hpp"
#include "kernels/internode/serving.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::internode {

struct DispatchSender {
  const InternodeDispatchParams& params;
  const NodeTarget* targets;
  std::uint64_t call;
  RowPipe pipe;
  bool near;  ///< some rank of this node gets its rows by its near window

  // Destinations of a token: the ranks of this node, by index, then the other nodes, by number.

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE const Rings& rings() const { return params.transfer.rings; }
  DEEP_EP_DEVICE int destinations() const { return grid().width + grid().others(); }
  DEEP_EP_DEVICE bool is_node(int destination) const { return destination >= grid().width; }

  /// A rank: the row's final place there. A node: the row's number among those for the node. -1: not wanted.
  DEEP_EP_DEVICE std::int32_t place_at(int token, int destination) const {
    if (destination >= destinations()) return -1;
    if (is_node(destination)) {
      const int node = grid().other(destination - grid().width);
      return load_stream(params.transfer.node_row + std::int64_t{token} * grid().nodes() + node);
    }
    const std::int32_t row = load_stream(params.transfer.destination_row + std::int64_t{token} * grid().num_ranks +
                                         grid().first_of_node() + destination);
    return row < targets[destination].capacity ? row : -1;
  }
  /// The row's final place at rank `index` of this node, if it goes there by its near window; -1 if not.
  DEEP_EP_DEVICE std::int32_t near_place_at(int token, int index) const {
    if (index >= grid().width) return -1;
    const std::int32_t row = load_stream(params.transfer.destination_row + std::int64_t{token} * grid().num_ranks +
                                         grid().first_of_node() + index);
    return row < targets[index].near_capacity ? row : -1;
  }
  DEEP_EP_DEVICE std::byte* slot(int number, std::int32_t row) const {
    return rings().staging(number, row).in(params.transfer.common.own_heap());
  }
  DEEP_EP_DEVICE std::byte* row_at(int destination, std::int32_t place) const {
    return is_node(destination) ? slot(destination - grid().width, place)
                                : targets[destination].rows.row(params.rows, place).x();
  }

  struct Unit {
    int token;  ///< num_tokens: none is left
    std::uint32_t offset;
    std::int32_t place;  ///< at the destination of this lane's index
  };

  DEEP_EP_DEVICE Unit take() const {
    for (;;) {
      const std::uint32_t taken = take_next(&params.transfer.common.state->next_token);
      if (taken >= static_cast<std::uint32_t>(params.transfer.num_tokens)) return {params.transfer.num_tokens, 0, -1};
      const auto token = static_cast<int>(taken);
      const std::int32_t place = place_at(token, lane_index());
      bool wanted = place >= 0;
      for (int at = lane_index() + kWarpSize; at < destinations(); at += kWarpSize) {
        wanted = wanted || place_at(token, at) >= 0;
      }
      for (int index = lane_index(); near && index < grid().width; index += kWarpSize) {
        wanted = wanted || near_place_at(token, index) >= 0;
      }
      if (warp::any(wanted)) return {token, 0, place};
    }
  }
  DEEP_EP_DEVICE bool is_last_piece(const Unit& unit) const {
    return unit.offset + pipe.stage_bytes >= params.rows.row_bytes;
  }
  DEEP_EP_DEVICE std::uint32_t bytes_of(const Unit& unit) const {
    return is_last_piece(unit) ? params.rows.row_bytes - unit.offset : pipe.stage_bytes;
  }
  DEEP_EP_DEVICE void load(const Unit& unit) {
    pipe.load(params.x + std::int64_t{unit.token} * params.rows.row_bytes + unit.offset, bytes_of(unit));
  }

  /// Calls `use(destination, place)` for each of this lane's destinations.
  template <class Use>
  DEEP_EP_DEVICE void for_each(const Unit& unit, Use use) const {
    std::int32_t place = unit.place;
    for (int destination = lane_index();;) {
      if (place >= 0) use(destination, place);
      destination += kWarpSize;
      if (destination >= destinations()) break;
      place = place_at(unit.token, destination);
    }
  }

  /// Waits until the token's slots may be written. False after a fault.
  DEEP_EP_DEVICE bool await_room(const Unit& unit) const {
    bool good = true;
    for_each(unit, [&](int destination, std::int32_t place) {
      const int chunk = rings().chunk_of(place);
      if (!is_node(destination) || chunk < rings().chunks) return;
      const int number = destination - grid().width;
      // The posting lane knows whom it waits for.
      good = poll_until([&](Poll&) { return is_stageable(params.transfer, call, number, chunk); },
                        [&](const Poll&) { return aborted(params.transfer.wait); }) &&
             good;
      bulk::fence_global();  // what the NIC has read may be overwritten by bulk stores
    });
    return warp::agree(good);
  }

  DEEP_EP_DEVICE std::uint32_t scale_of(int token, int at) const { return load_stream(params.scales.at(token, at)); }
  DEEP_EP_DEVICE Sidecar sidecar_of(int token) const {
    Sidecar sidecar;
    for (int i = 0; i < Sidecar::kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) sidecar.scales[i] = scale_of(token, at);
    }
    if (lane_index() < params.rows.num_topk) {
      const std::int64_t at = std::int64_t{token} * params.rows.num_topk + lane_index();
      sidecar.expert = expert_of(params.topk_idx.load(at), params.num_local_experts * grid().num_ranks);
      if (params.topk_weights != nullptr) sidecar.weight = load_stream(params.topk_weights + at);
    }
    sidecar.src_idx = token;
    return sidecar;
  }

  /// By the whole warp: what travels beside the row.
  DEEP_EP_DEVICE void store_sidecars(const Unit& unit) const {
    const RowShape& shape = params.rows;
    const auto scale = [&](int at) { return scale_of(unit.token, at); };
    const Sidecar sidecar = sidecar_of(unit.token);
    for (int first = 0; first < destinations(); first += kWarpSize) {
      const std::int32_t mine = first == 0 ? unit.place : place_at(unit.token, first + lane_index());
      for (std::uint32_t left = warp::ballot(mine >= 0); left != 0; left &= left - 1) {
        const int destination = first + lowest_bit(left);
        const std::int32_t place = warp::shuffle(mine, lowest_bit(left));
        if (is_node(destination)) {
          const int number = destination - grid().width;
          pack(unit.token, grid().other(number), {slot(number, place), shape}, sidecar);
        } else {
          // A copy: the original is in shared memory, and for all the compiler knows each store here changes it.
          const RowTargets rows = targets[destination].rows;
          store_sidecar(params, sidecar, rows.row(shape, place), grid().first_of_node() + destination, scale);
        }
      }
    }
  }
  /// Into a slot for a rank of `node`.
  DEEP_EP_DEVICE void pack(int token, int node, const PackedRow& packed, const Sidecar& sidecar) const {
    for (int i = 0; i < Sidecar::kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) packed.scales()[at] = sidecar.scales[i];
    }
    for (int at = lane_index() + Sidecar::kHeld * kWarpSize; at < params.rows.num_scales; at += kWarpSize) {
      packed.scales()[at] = scale_of(token, at);
    }
    if (lane_index() < params.rows.num_topk) {
      packed.experts()[lane_index()] = sidecar.expert;
      packed.weights()[lane_index()] = sidecar.weight;
    }
    if (lane_index() == 0) *packed.src_idx() = token;
    const std::int32_t* rows =
        params.transfer.destination_row + std::int64_t{token} * grid().num_ranks + node * grid().width;
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      packed.rows()[index] = load_stream(rows + index);
    }
  }

  /// By the whole warp: to the near windows that the row goes by. False after a fault.
  DEEP_EP_DEVICE bool send_to_near_windows(int token) const {
    return send_near(
        params.transfer, call, [&](int index) { return near_place_at(token, index) >= 0; },
        [&](std::byte* slot) {
          copy_row(slot, params.x + std::int64_t{token} * params.rows.row_bytes, params.rows.row_bytes);
          pack(token, grid().node(), {slot, params.rows}, sidecar_of(token));
        });
  }

  /// The token's row is stored, as this warp has made sure: counts it in the chunks that it belongs to.
  DEEP_EP_DEVICE void count_staged(const Unit& unit) const {
    bulk::fence_global();
    warp::sync();  // what the other lanes have stored comes before, too
    for_each(unit, [&](int destination, std::int32_t place) {
      if (!is_node(destination)) return;
      const int counter = rings().counter(destination - grid().width, rings().chunk_of(place));
      fetch_add_release<Scope::gpu>(params.transfer.common.staged + counter, std::uint32_t{1});
    });
  }

  /// Sends tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool send_all() {
    const int end = params.transfer.num_tokens;
    Unit unit = take();
    Unit stored{end, 0, -1};  // whose last piece may not be complete yet
    if (unit.token < end) load(unit);
    while (unit.token < end) {
      const Unit following =
          is_last_piece(unit) ? take() : Unit{unit.token, unit.offset + pipe.stage_bytes, unit.place};
      if (following.token < end) load(following);
      if (unit.offset == 0) {
        if (stored.token < end) {
          // Before waiting for room: others may wait for this row.
          bulk::wait<0>();
          count_staged(stored);
          stored.token = end;
        }
        if (!await_room(unit) || (near && !send_to_near_windows(unit.token))) {
          pipe.drop();
          return false;
        }
        store_sidecars(unit);
      }
      pipe.store(bytes_of(unit), [&](auto store) {
        for_each(unit, [&](int destination, std::int32_t place) { store(row_at(destination, place) + unit.offset); });
      });
      if (is_last_piece(unit)) stored = unit;
      unit = following;
    }
    bulk::wait<0>();
    if (stored.token < end) count_staged(stored);
    bulk::fence_global();
    return true;
  }
};

}  // namespace deep_ep::device::internode
