// Shared memory of a dispatch block, and a row as it crosses the network.
#pragma once

#include "kernels/internode/near_passing.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/mbarrier.hpp"

namespace deep_ep {

/// What is known of one rank of this node.
struct NodeTarget {
  RowTargets rows;             ///< its memory, as mapped here
  std::int64_t capacity;       ///< rows it has room for there
  std::int64_t near_capacity;  ///< the same where they come by its near window
};

struct InternodeDispatchShared {
  std::int32_t* scratch;
  NodeTarget* targets;         ///< [width]
  std::int32_t* next;          ///< [warps][other nodes]
  RailPairs* pairs;            ///< [rails of the block, or lanes of them]
  std::int32_t* near_rows;     ///< [width]: rows that come by our near window, if they do
  std::int32_t* near_next;     ///< [near warps][width]
  device::Mbarrier* barriers;  ///< [warps][stages]
  std::byte* stages;
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE InternodeDispatchShared(Carver carver, const NodeGrid& grid, int lanes, int blocks, int warps,
                                              int near_warps, int num_stages, std::uint32_t stage_bytes)
      : scratch(carver.take<std::int32_t>()),
        targets(carver.take<NodeTarget>(static_cast<std::size_t>(grid.width), kLine)),
        next(carver.take<std::int32_t>(static_cast<std::size_t>(warps * grid.others()))),
        pairs(carver.take<RailPairs>(RailPairs::of_block(grid, lanes, blocks), kLine)),
        near_rows(carver.take<std::int32_t>(static_cast<std::size_t>(near_warps == 0 ? 0 : int{grid.width}))),
        near_next(carver.take<std::int32_t>(static_cast<std::size_t>(near_warps * grid.width))),
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

/// By a whole warp: what came with a row.
DEEP_EP_DEVICE Sidecar unpack_sidecar(const PackedRow& packed) {
  Sidecar sidecar;
  for (int i = 0; i < Sidecar::kHeld; ++i) {
    const int at = lane_index() + i * kWarpSize;
    if (at < packed.shape.num_scales) sidecar.scales[i] = load_weak(packed.scales() + at);
  }
  if (lane_index() < packed.shape.num_topk) {
    sidecar.expert = load_weak(packed.experts() + lane_index());
    sidecar.weight = load_weak(packed.weights() + lane_index());
  }
  sidecar.src_idx = load_weak(packed.src_idx());
  return sidecar;
}

/// Does any rank of this node get its rows by its near window?
DEEP_EP_DEVICE bool any_near(const NodeTarget* targets, int width) {
  bool found = false;
  for (int index = lane_index(); index < width; index += kWarpSize) found = found || targets[index].near_capacity != 0;
  return warp::any(found);
}

/// By a whole warp: stores a row in the near window of each rank of this node for which `wants(its index)` is true.
/// `store(slot)` does so. False after a fault.
///
/// A warp takes a number only when it has stored what it took before, so the oldest number not stored waits for nobody
/// but the receiver, who takes rows as they come.
template <class Wants, class Store>
DEEP_EP_DEVICE bool send_near(const TransferParams& params, std::uint64_t call, Wants wants, Store store) {
  const NodeGrid& grid = params.common.grid;
  const NearQueues queues{params, call};
  for (int first = 0; first < grid.width; first += kWarpSize) {
    for (std::uint32_t left = warp::ballot(wants(first + lane_index())); left != 0; left &= left - 1) {
      const int to = first + lowest_bit(left);
      const auto n = static_cast<std::int32_t>(take_next(params.common.near_tickets + to));
      const int slots = params.near.slots;
      if (n >= slots && !wait_signal<WholeWarp>(
                            params.wait, queues.emptied(to, n),
                            {grid.first_of_node() + to, Wanted::internode_near_room, queues.progress(n - slots)})) {
        return false;
      }
      bulk::fence_global();  // whatever the warp has acquired by waiting, its bulk stores come behind
      store(queues.slot_at(to, grid.index(), n));
      queues.fill(to, grid.index(), n);
    }
  }
  return true;
}

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
