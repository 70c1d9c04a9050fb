// Rows of a dispatch as a warp holds them and as they go through rings, and the shared memory of a block.
#pragma once

#include <utility>

#include "kernels/common/row_pipe.hpp"
#include "kernels/normal/transfer.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/bulk.hpp"

namespace deep_ep {

/// The memory for rows at one rank of this node.
struct NodeTarget {
  RowTargets rows;         ///< its memory, as mapped here
  std::int32_t capacity;   ///< rows it has room for
  std::int32_t reachable;  ///< the same; 0 where they come by its local rings, and `rows` means nothing
};

struct DispatchShared : TransferShared<NodeTarget> {
  WarpStages pipes;  ///< of the moving warps
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE DispatchShared(Carver carver, const TransferParams& params, int blocks, int stages,
                                     std::uint32_t stage_bytes)
      : TransferShared(carver, params, blocks, params.common.grid.width),
        pipes(carver, params.moving_warps(), stages, stage_bytes),
        bytes(pipes.bytes) {}
};

/// A slot of a ring in dispatch: the row, and all that the rank behind it needs to put it into place.
struct PackedRow {
  std::byte* at;
  const RowShape& shape;

  DEEP_EP_DEVICE std::uint32_t* scales() const { return reinterpret_cast<std::uint32_t*>(at + shape.row_bytes); }
  /// [num_topk]: global, -1 for none.
  DEEP_EP_DEVICE std::int32_t* experts() const { return reinterpret_cast<std::int32_t*>(scales() + shape.num_scales); }
  DEEP_EP_DEVICE float* weights() const { return reinterpret_cast<float*>(experts() + shape.num_topk); }
  DEEP_EP_DEVICE std::int32_t* src_idx() const { return reinterpret_cast<std::int32_t*>(weights() + shape.num_topk); }
  /// [width]: the row's final place at each rank of the node, -1 where it is not wanted.
  DEEP_EP_DEVICE std::int32_t* places() const { return src_idx() + 1; }

  static std::size_t bytes(const RowShape& shape, int width) {
    return shape.row_bytes + (static_cast<std::size_t>(shape.num_scales) +
                              2 * static_cast<std::size_t>(shape.num_topk) + 1 + static_cast<std::size_t>(width)) *
                                 4;
  }
};

namespace device::normal {

// A row that a warp spreads: what travels beside it, and the places where it goes.

/// A token of this rank.
template <bool kRails>
struct TokenRow {
  static constexpr bool kForAllNodes = kRails;

  const DispatchParams* params;
  int token;

  DEEP_EP_DEVICE const std::byte* x() const { return params->x + std::int64_t{token} * params->rows.row_bytes; }
  DEEP_EP_DEVICE std::uint32_t scale(int at) const {
    const int weight = kRails ? at - (params->rows.num_scales - params->weights_as_scales) : -1;
    if (weight < 0) return load_stream(params->scales.at(token, at));
    const auto* weights = reinterpret_cast<const std::uint32_t*>(params->topk_weights);
    return load_stream(weights + std::int64_t{token} * params->weights_as_scales + weight);
  }
  DEEP_EP_DEVICE std::int64_t selection_at(int at) const { return std::int64_t{token} * params->rows.num_topk + at; }
  DEEP_EP_DEVICE TopkIndices::Words selection(int at) const { return params->topk_idx.load_words(selection_at(at)); }
  DEEP_EP_DEVICE int expert(const TopkIndices::Words& selected) const {
    return expert_of(params->topk_idx.index_of(selected),
                     params->num_local_experts * params->transfer.common.num_ranks);
  }
  DEEP_EP_DEVICE float weight(int at) const {
    return params->topk_weights == nullptr ? 0.0f : load_stream(params->topk_weights + selection_at(at));
  }
  DEEP_EP_DEVICE std::int32_t src_idx() const { return token; }
  /// Its final place at rank `index` of node `node`; -1: not wanted.
  DEEP_EP_DEVICE std::int32_t place_of(int node, int index) const {
    const int rank = kRails ? node * params->transfer.common.grid.width + index : index;
    return load_stream(params->transfer.destination_row + std::int64_t{token} * params->transfer.common.num_ranks +
                       rank);
  }
  /// Its number among the rows for node `node`; -1: not wanted.
  DEEP_EP_DEVICE std::int32_t number_for(int node) const {
    return load_stream(params->transfer.node_row + std::int64_t{token} * params->transfer.common.grid.nodes() + node);
  }
};

/// A row for the ranks of this node, in a slot that the warp has acquired.
struct SlotRow {
  static constexpr bool kForAllNodes = false;

  PackedRow slot;

  DEEP_EP_DEVICE const std::byte* x() const { return slot.at; }
  DEEP_EP_DEVICE std::uint32_t scale(int at) const { return load_weak(slot.scales() + at); }
  DEEP_EP_DEVICE std::int32_t selection(int at) const { return load_weak(slot.experts() + at); }
  DEEP_EP_DEVICE static int expert(std::int32_t selected) { return selected; }
  DEEP_EP_DEVICE float weight(int at) const { return load_weak(slot.weights() + at); }
  DEEP_EP_DEVICE std::int32_t src_idx() const { return load_weak(slot.src_idx()); }
  DEEP_EP_DEVICE std::int32_t place_of(int, int index) const { return load_weak(slot.places() + index); }
};

/// A row as the lanes of a warp hold it between reading and writing. Nothing that load() loads is looked at before it
/// is used: so the loads of one row may be under way while the warp stores another. All by a whole warp.
template <class Row>
struct HeldRow {
  static constexpr int kScales = 4;  ///< that a lane holds; more are read again for each destination

  Row row;
  std::int32_t place = -1;  ///< at the destination of the lane's index: see RowSpreader
  std::uint32_t scales[kScales] = {};
  decltype(std::declval<const Row&>().selection(0)) selection{};
  float weight = 0;
  std::int32_t src_idx = 0;

  DEEP_EP_DEVICE static HeldRow load(const DispatchParams& params, const Row& row, std::int32_t place) {
    HeldRow held{row, place};
    for (int i = 0; i < kScales; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) held.scales[i] = row.scale(at);
    }
    if (lane_index() < params.rows.num_topk) {
      held.selection = row.selection(lane_index());
      held.weight = row.weight(lane_index());
    }
    held.src_idx = row.src_idx();
    return held;
  }

  DEEP_EP_DEVICE void store_scales(const DispatchParams& params, std::uint32_t* to) const {
    for (int i = 0; i < kScales; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) to[at] = scales[i];
    }
    for (int at = lane_index() + kScales * kWarpSize; at < params.rows.num_scales; at += kWarpSize)
      to[at] = row.scale(at);
  }
  /// To the row's final place, at rank `rank`.
  DEEP_EP_DEVICE void store(const DispatchParams& params, const RowTargets::Row& to, int rank) const {
    store_scales(params, to.scales());
    if (lane_index() < params.rows.num_topk) {
      const int expert = row.expert(selection);
      const int local = expert - rank * params.num_local_experts;
      const bool here = expert >= 0 && local >= 0 && local < params.num_local_experts;
      store_topk_index(to.topk_idx(), params.rows.topk_idx_is_64_bit, lane_index(), here ? local : -1);
      to.topk_weights()[lane_index()] = here ? weight : 0.0f;
    }
    if (params.send_src_idx && lane_index() == 0) *to.src_idx() = src_idx;
  }
  /// To a slot for ranks of node `node`.
  DEEP_EP_DEVICE void pack(const DispatchParams& params, const PackedRow& to, int node) const {
    store_scales(params, to.scales());
    if (lane_index() < params.rows.num_topk) {
      to.experts()[lane_index()] = row.expert(selection);
      to.weights()[lane_index()] = weight;
    }
    if (lane_index() == 0) *to.src_idx() = src_idx;
    for (int index = lane_index(); index < params.transfer.common.grid.width; index += kWarpSize) {
      to.places()[index] = row.place_of(node, index);
    }
  }
};

// Senders and forwarders of dispatch spread rows: a warp loads each row once into shared memory, and stores it from
// there.

/// Spreads a warp's rows to destinations: the ranks of this node, by index, and, for a row of this rank, the other
/// nodes, by number. A row's place at a destination is its final place at a rank, or its number among the rows for a
/// node; -1: it is not wanted there.
template <bool kRails>
struct RowSpreader {
  const DispatchParams& params;
  const NodeTarget* targets;
  std::uint64_t epoch;
  RowPipe pipe;
  bool by_rings;  ///< some rank of this node gets its rows by its local rings

  DEEP_EP_DEVICE RowSpreader(const DispatchParams& dispatch, const NodeTarget* node_targets, std::uint64_t call_epoch,
                             const RowPipe& row_pipe)
      : params(dispatch), targets(node_targets), epoch(call_epoch), pipe(row_pipe), by_rings(false) {
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      by_rings |= targets[index].reachable != targets[index].capacity;
    }
    by_rings = warp::any(by_rings);
  }

  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(params.transfer.common); }
  DEEP_EP_DEVICE const Rings& rings() const { return params.transfer.rings; }
  DEEP_EP_DEVICE bool is_node(int destination) const { return kRails && destination >= grid().width; }
  template <class Row>
  DEEP_EP_DEVICE int destinations(const Row&) const {
    return grid().width + (Row::kForAllNodes ? grid().others() : 0);
  }

  template <class Row>
  DEEP_EP_DEVICE std::int32_t place_at(const Row& row, int destination) const {
    if (destination >= destinations(row)) return -1;
    if constexpr (Row::kForAllNodes) {
      if (is_node(destination)) return row.number_for(grid().other(destination - grid().width));
    }
    return row.place_of(grid().node(), destination);
  }
  /// Does the warp store a row with this place there? Not one that the rank has no room for, or gets by a local ring.
  DEEP_EP_DEVICE bool is_stored(int destination, std::int32_t place) const {
    return place >= 0 && (is_node(destination) || place < targets[destination].reachable);
  }
  DEEP_EP_DEVICE bool goes_by_ring(int index, std::int32_t place) const {
    return place >= targets[index].reachable && place < targets[index].capacity;
  }
  template <class Row>
  DEEP_EP_DEVICE HeldRow<Row> hold(const Row& row) const {
    return HeldRow<Row>::load(params, row, place_at(row, lane_index()));
  }

  /// Does anything travel beside rows?
  DEEP_EP_DEVICE bool has_sidecars() const {
    return kRails || params.rows.num_scales > 0 || params.topk_idx.data != nullptr || params.send_src_idx;
  }
  DEEP_EP_DEVICE std::byte* staging_slot(int destination, std::int32_t place) const {
    return rings().staging(destination - grid().width, place).in(params.transfer.common.own_heap());
  }

  /// Calls `use(destination, place)` for each of this lane's destinations to which the warp stores the row.
  template <class Row, class Use>
  DEEP_EP_DEVICE void for_each(const HeldRow<Row>& held, Use use) const {
    std::int32_t place = held.place;
    for (int destination = lane_index();;) {
      if (is_stored(destination, place)) use(destination, place);
      destination += kWarpSize;
      if (destination >= destinations(held.row)) break;
      place = place_at(held.row, destination);
    }
  }

  DEEP_EP_DEVICE void load(const std::byte* x, std::uint32_t offset) {
    const std::uint32_t rest = params.rows.row_bytes - offset;
    pipe.load(x + offset, rest < pipe.stage_bytes ? rest : pipe.stage_bytes);
  }

  /// By the whole warp: what travels beside the row.
  template <class Row>
  DEEP_EP_DEVICE void store_sidecars(const HeldRow<Row>& held) const {
    for (int first = 0; first < destinations(held.row); first += kWarpSize) {
      const std::int32_t mine = first == 0 ? held.place : place_at(held.row, first + lane_index());
      for (std::uint32_t left = warp::ballot(is_stored(first + lane_index(), mine)); left != 0; left &= left - 1) {
        const int destination = first + lowest_bit(left);
        const std::int32_t place = warp::shuffle(mine, lowest_bit(left));
        if constexpr (Row::kForAllNodes) {
          if (is_node(destination)) {
            held.pack(params, {staging_slot(destination, place), params.rows},
                      grid().other(destination - grid().width));
            continue;
          }
        }
        // A copy: the original is in shared memory, and for all the compiler knows each store here changes it.
        const RowTargets rows = targets[destination].rows;
        held.store(params, rows.row(params.rows, place), grid().first_of_node() + destination);
      }
    }
  }

  /// By the whole warp: stores the row in the local rings that it goes by. False after a fault.
  ///
  /// A warp takes a number only when it has stored what it took before, so the oldest number not stored waits for
  /// nothing but the receiver, which takes rows as they come.
  template <class Row>
  DEEP_EP_DEVICE bool store_in_rings(const HeldRow<Row>& held) const {
    for (int first = 0; first < grid().width; first += kWarpSize) {
      const int index = first + lane_index();
      const bool mine = index < grid().width && goes_by_ring(index, place_at(held.row, index));
      for (std::uint32_t left = warp::ballot(mine); left != 0; left &= left - 1) {
        const int to = first + lowest_bit(left);
        const TokenRing ring{params.transfer, epoch, grid().first_of_node() + to, to, grid().index(), 0};
        const auto n = static_cast<std::int32_t>(take_next(params.transfer.common.local_tickets + to));
        if (!ring.acquire(n)) return false;
        bulk::fence_global();  // bulk stores come behind what the warp has acquired
        copy_row(ring.slot_there(n), held.row.x(), params.rows.row_bytes);
        held.pack(params, {ring.slot_there(n), params.rows}, grid().node());
        ring.publish(n);
      }
    }
    return true;
  }

  /// Begins to store the row, whose first piece is loading. `load_next()` begins to load the first piece of the row
  /// behind it, if there is one; `may_store()` waits for the row's slots. False after a fault.
  template <class Row, class LoadNext, class MayStore>
  DEEP_EP_DEVICE bool spread(const HeldRow<Row>& held, LoadNext load_next, MayStore may_store) {
    for (std::uint32_t offset = 0; offset < params.rows.row_bytes; offset += pipe.stage_bytes) {
      const std::uint32_t rest = params.rows.row_bytes - offset;
      if (rest > pipe.stage_bytes) {
        load(held.row.x(), offset + pipe.stage_bytes);
      } else {
        load_next();
      }
      if (offset == 0) {
        if (!may_store() || (by_rings && !store_in_rings(held))) {
          pipe.drop();
          return false;
        }
        if (has_sidecars()) store_sidecars(held);
      }
      pipe.store(rest < pipe.stage_bytes ? rest : pipe.stage_bytes, [&](auto store) {
        for_each(held, [&](int destination, std::int32_t place) {
          store((is_node(destination) ? staging_slot(destination, place)
                                      : targets[destination].rows.row(params.rows, place).x()) +
                offset);
        });
      });
    }
    return true;
  }
};

}  // namespace device::normal
}  // namespace deep_ep
