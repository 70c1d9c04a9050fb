// Rows of a dispatch as a warp holds them and as they cross the network, and the shared memory of a block.
#pragma once

#include "kernels/internode/token_ring.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/mbarrier.hpp"

namespace deep_ep {

/// The memory for rows at one rank of this node.
struct NodeTarget {
  RowTargets rows;        ///< its memory, as mapped here
  std::int64_t capacity;  ///< rows it has room for
  bool by_ring;           ///< they come by its local rings; `rows` means nothing
};

struct InternodeDispatchShared : TransferShared<NodeTarget> {
  device::Mbarrier* barriers;  ///< [warps][stages]
  std::byte* stages;
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE InternodeDispatchShared(Carver carver, const TransferParams& params, int blocks, int num_stages,
                                              std::uint32_t stage_bytes)
      : TransferShared(carver, params, blocks, params.common.grid.width),
        barriers(carver.take<device::Mbarrier>(static_cast<std::size_t>(params.moving_warps() * num_stages), kLine)),
        stages(
            carver.take<std::byte>(static_cast<std::size_t>(params.moving_warps() * num_stages) * stage_bytes, kLine)),
        bytes(carver.bytes()) {}
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

namespace device::internode {

// A row that a warp spreads, and what travels beside it. `place`: at the destination of this lane's index
// (RowSpreader).

/// A token of this rank.
struct TokenRow {
  static constexpr bool kForAllNodes = true;

  const InternodeDispatchParams* params;
  int token;
  std::int32_t place = -1;

  DEEP_EP_DEVICE const std::byte* x() const { return params->x + std::int64_t{token} * params->rows.row_bytes; }
  DEEP_EP_DEVICE std::uint32_t scale(int at) const { return load_stream(params->scales.at(token, at)); }
  DEEP_EP_DEVICE std::int64_t selection(int at) const { return std::int64_t{token} * params->rows.num_topk + at; }
  DEEP_EP_DEVICE int expert(int at) const {
    const int experts = params->num_local_experts * params->transfer.common.grid.num_ranks;
    return expert_of(params->topk_idx.load(selection(at)), experts);
  }
  DEEP_EP_DEVICE float weight(int at) const {
    return params->topk_weights == nullptr ? 0.0f : load_stream(params->topk_weights + selection(at));
  }
  DEEP_EP_DEVICE std::int32_t src_idx() const { return token; }
  /// Its final place at rank `index` of node `node`; -1: not wanted.
  DEEP_EP_DEVICE std::int32_t place_of(int node, int index) const {
    const NodeGrid& grid = params->transfer.common.grid;
    const std::int64_t at = std::int64_t{token} * grid.num_ranks + node * grid.width + index;
    return load_stream(params->transfer.destination_row + at);
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
  std::int32_t place = -1;

  DEEP_EP_DEVICE const std::byte* x() const { return slot.at; }
  DEEP_EP_DEVICE std::uint32_t scale(int at) const { return load_weak(slot.scales() + at); }
  DEEP_EP_DEVICE int expert(int at) const { return load_weak(slot.experts() + at); }
  DEEP_EP_DEVICE float weight(int at) const { return load_weak(slot.weights() + at); }
  DEEP_EP_DEVICE std::int32_t src_idx() const { return load_weak(slot.src_idx()); }
  DEEP_EP_DEVICE std::int32_t place_of(int, int index) const { return load_weak(slot.places() + index); }
};

/// Scales and selections of one row, as lanes hold them between reading and writing. All by a whole warp.
template <class Row>
struct Sidecar {
  static constexpr int kHeld = 4;  ///< scales that a lane keeps in registers; more are read again for each destination

  const InternodeDispatchParams& params;
  const Row& row;
  std::uint32_t scales[kHeld] = {};
  int expert = -1;  ///< global
  float weight = 0;
  std::int32_t src_idx;

  DEEP_EP_DEVICE Sidecar(const InternodeDispatchParams& dispatch, const Row& of_row)
      : params(dispatch), row(of_row), src_idx(row.src_idx()) {
    for (int i = 0; i < kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) scales[i] = row.scale(at);
    }
    if (lane_index() >= params.rows.num_topk) return;
    expert = row.expert(lane_index());
    weight = row.weight(lane_index());
  }

  DEEP_EP_DEVICE void store_scales(std::uint32_t* to) const {
    for (int i = 0; i < kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) to[at] = scales[i];
    }
    for (int at = lane_index() + kHeld * kWarpSize; at < params.rows.num_scales; at += kWarpSize)
      to[at] = row.scale(at);
  }
  /// To the row's final place, at rank `rank`.
  DEEP_EP_DEVICE void store(const RowTargets::Row& to, int rank) const {
    store_scales(to.scales());
    if (lane_index() < params.rows.num_topk) {
      const int local = expert - rank * params.num_local_experts;
      const bool here = expert >= 0 && local >= 0 && local < params.num_local_experts;
      store_topk_index(to.topk_idx(), params.rows.topk_idx_is_64_bit, lane_index(), here ? local : -1);
      to.topk_weights()[lane_index()] = here ? weight : 0.0f;
    }
    if (params.send_src_idx && lane_index() == 0) *to.src_idx() = src_idx;
  }
  /// To a slot for ranks of node `node`.
  DEEP_EP_DEVICE void pack(const PackedRow& to, int node) const {
    store_scales(to.scales());
    if (lane_index() < params.rows.num_topk) {
      to.experts()[lane_index()] = expert;
      to.weights()[lane_index()] = weight;
    }
    if (lane_index() == 0) *to.src_idx() = src_idx;
    for (int index = lane_index(); index < params.transfer.common.grid.width; index += kWarpSize) {
      to.places()[index] = row.place_of(node, index);
    }
  }
};

}  // namespace device::internode
}  // namespace deep_ep
