// The rows of a combine: those of the ranks of this node are in the heap or in our local rings; those of each other
// node, summed up, are in the landing rings.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/internode/serving.hpp"

namespace deep_ep {

/// The rows of one rank of this node.
struct NodeRows {
  const std::byte* x;  ///< its rows, as mapped here
  const float* topk_weights;
  std::int32_t num_rows;  ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
  bool pushed;            ///< into our local rings; x and topk_weights mean nothing
};

struct InternodeCombineShared : TransferShared<NodeRows> {
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE InternodeCombineShared(Carver carver, const TransferParams& params, int blocks)
      : TransferShared(carver, params, blocks, params.common.grid.num_ranks), bytes(carver.bytes()) {}
};

namespace device::internode {

/// Rows that the ranks of this node hold of tokens of this rank, or of its rail in another node.
struct LocalRows {
  const InternodeCombineParams& params;
  const NodeRows* ranks;  ///< [width]
  std::uint64_t call;
  bool by_rings;  ///< some rank of this node pushes its rows

  DEEP_EP_DEVICE LocalRows(const InternodeCombineParams& combine, const NodeRows* node_ranks, std::uint64_t number)
      : params(combine), ranks(node_ranks), call(number), by_rings(false) {
    for (int index = lane_index(); index < grid().width; index += kWarpSize) by_rings |= ranks[index].pushed;
    by_rings = warp::any(by_rings);
  }

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  /// The ring by which rank `index` pushes rows of tokens of `node` to this rank, or this rank to that one. There is
  /// one for each node, so that rows are read in their order, and no node waits for another.
  DEEP_EP_DEVICE static TokenRing ring(const InternodeCombineParams& params, std::uint64_t call, int index, int node) {
    const NodeGrid& grid = params.transfer.common.grid;
    return {params.transfer, call, index, index * grid.nodes() + node, grid.index() * grid.nodes() + node};
  }
  /// Of the rows of `destination`, the first that is of a token of `source`.
  DEEP_EP_DEVICE static std::int32_t first_row(const InternodeCombineParams& params, int source, int destination) {
    const int ranks = params.transfer.common.grid.num_ranks;
    return source == 0 ? 0 : params.rank_prefix_matrix[(source - 1) * ranks + destination];
  }

  // Of row `row` of rank `index`, of a token of `node`.

  DEEP_EP_DEVICE bool is_held(int index, std::int32_t row) const { return row >= 0 && row < ranks[index].num_rows; }
  DEEP_EP_DEVICE bool is_pushed(int index, std::int32_t row) const {
    return by_rings && is_held(index, row) && ranks[index].pushed;
  }
  DEEP_EP_DEVICE TokenRing ring(int index, int node) const { return ring(params, call, index, node); }
  DEEP_EP_DEVICE std::int32_t in_ring(int index, int node, std::int32_t row) const {
    return row - first_row(params, grid().rail_in(node), grid().first_of_node() + index);
  }

  /// The word that says that it is there; without a word if it always is.
  DEEP_EP_DEVICE AwaitedWord awaited(int index, int node, std::int32_t row) const {
    return is_pushed(index, row) ? ring(index, node).row(in_ring(index, node, row)) : AwaitedWord{};
  }
  /// A row that lies in a slot has its weights behind it.
  DEEP_EP_DEVICE FoundRow in_slot(const std::byte* slot) const {
    return {slot, reinterpret_cast<const float*>(slot + params.row_bytes)};
  }
  DEEP_EP_DEVICE FoundRow find(int index, int node, std::int32_t row) const {
    if (is_pushed(index, row)) return in_slot(ring(index, node).slot(in_ring(index, node, row)));
    if (!is_held(index, row)) return {};
    return {ranks[index].x + std::int64_t{row} * params.row_bytes,
            ranks[index].topk_weights + std::int64_t{row} * params.num_topk};
  }
  /// By one lane, when the whole warp has read it.
  DEEP_EP_DEVICE void release(int index, int node, std::int32_t row) const {
    if (is_pushed(index, row)) ring(index, node).release(in_ring(index, node, row));
  }
};

}  // namespace device::internode
}  // namespace deep_ep
