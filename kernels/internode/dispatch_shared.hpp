// Shared memory of a dispatch block, and a row as it crosses the network.
#pragma once

#include "kernels/internode/params.hpp"
#include "kernels/primitives/mbarrier.hpp"

namespace deep_ep {

/// What is known of one rank of this node.
struct NodeTarget {
  RowTargets rows;        ///< its memory, as mapped here
  std::int64_t capacity;  ///< rows it has room for
};

struct InternodeDispatchShared {
  std::int32_t* scratch;
  NodeTarget* targets;         ///< [width]
  std::int32_t* next;          ///< [warps][other nodes]
  RailPairs* pairs;            ///< [rails of the block]
  device::Mbarrier* barriers;  ///< [warps][stages]
  std::byte* stages;
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE InternodeDispatchShared(Carver carver, const NodeGrid& grid, int blocks, int warps,
                                              int num_stages, std::uint32_t stage_bytes)
      : scratch(carver.take<std::int32_t>()),
        targets(carver.take<NodeTarget>(static_cast<std::size_t>(grid.width), kLine)),
        next(carver.take<std::int32_t>(static_cast<std::size_t>(warps * grid.others()))),
        pairs(carver.take<RailPairs>(RailPairs::of_block(grid, blocks), kLine)),
        barriers(carver.take<device::Mbarrier>(static_cast<std::size_t>(warps * num_stages), kLine)),
        stages(carver.take<std::byte>(static_cast<std::size_t>(warps * num_stages) * stage_bytes, kLine)),
        bytes(carver.bytes()) {}
};

/// A slot of a ring in dispatch: the row, and all that the relay needs to put it into place.
struct PackedRow {
  std::byte* at;
  const RowShape& shape;

  DEEP_EP_DEVICE std::uint32_t* scales() const { return reinterpret_cast<std::uint32_t*>(at + shape.row_bytes); }
  /// [num_topk]: global, -1 for none.
  DEEP_EP_DEVICE std::int32_t* experts() const { return reinterpret_cast<std::int32_t*>(scales() + shape.num_scales); }
  DEEP_EP_DEVICE float* weights() const { return reinterpret_cast<float*>(experts() + shape.num_topk); }
  DEEP_EP_DEVICE std::int32_t* src_idx() const { return reinterpret_cast<std::int32_t*>(weights() + shape.num_topk); }
  /// [width]: the row's final place at each rank of the node, -1 where it is not wanted.
  DEEP_EP_DEVICE std::int32_t* rows() const { return src_idx() + 1; }

  static std::size_t bytes(const RowShape& shape, int width) {
    return shape.row_bytes + (static_cast<std::size_t>(shape.num_scales) +
                              2 * static_cast<std::size_t>(shape.num_topk) + 1 + static_cast<std::size_t>(width)) *
                                 4;
  }
};

namespace device::internode {

/// Scales, selections and source index of one row, as lanes hold them between reading and writing.
struct Sidecar {
  static constexpr int kHeld = 4;  ///< scales that a lane keeps in registers; more are read again for each destination

  std::uint32_t scales[kHeld] = {};
  int expert = -1;
  float weight = 0;
  std::int32_t src_idx = 0;
};

/// By a whole warp: writes it to `row` of rank `rank`. `scale(i)` reads scale i again.
template <class Scale>
DEEP_EP_DEVICE void store_sidecar(const InternodeDispatchParams& params, const Sidecar& from,
                                  const RowTargets::Row& row, int rank, Scale scale) {
  const RowShape& shape = params.rows;
  for (int i = 0; i < Sidecar::kHeld; ++i) {
    const int at = lane_index() + i * kWarpSize;
    if (at < shape.num_scales) row.scales()[at] = from.scales[i];
  }
  for (int at = lane_index() + Sidecar::kHeld * kWarpSize; at < shape.num_scales; at += kWarpSize) {
    row.scales()[at] = scale(at);
  }
  if (lane_index() < shape.num_topk) {
    const int local = from.expert - rank * params.num_local_experts;
    const bool here = from.expert >= 0 && local >= 0 && local < params.num_local_experts;
    store_topk_index(row.topk_idx(), shape.topk_idx_is_64_bit, lane_index(), here ? local : -1);
    row.topk_weights()[lane_index()] = here ? from.weight : 0.0f;
  }
  if (params.send_src_idx && lane_index() == 0) *row.src_idx() = from.src_idx;
}

}  // namespace device::internode
}  // namespace deep_ep
