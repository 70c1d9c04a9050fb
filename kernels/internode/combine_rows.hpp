// Where the rows of a combine are: at the ranks of this node, which let us read them or push them through our near
// window, and, summed up by each other node, in the landing rings.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/internode/near_passing.hpp"
#include "kernels/internode/serving.hpp"

namespace deep_ep {

/// What is known of one rank of this node.
struct NodeRows {
  const std::byte* x;  ///< its rows, as mapped here
  const float* topk_weights;
  std::int32_t num_rows;  ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
  bool pushed;            ///< through our near window; x and topk_weights mean nothing
};

struct InternodeCombineShared {
  std::int32_t* scratch;
  NodeRows* ranks;          ///< [width]
  std::int32_t* next;       ///< [warps][other nodes]
  RailPairs* pairs;         ///< [rails of the block, or lanes of them]
  std::int32_t* near_rows;  ///< [num_ranks]: rows that we push into each queue, if we do
  std::int32_t* near_next;  ///< [near warps][num_ranks]
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE InternodeCombineShared(Carver carver, const NodeGrid& grid, int lanes, int blocks, int warps,
                                             int near_warps)
      : scratch(carver.take<std::int32_t>()),
        ranks(carver.take<NodeRows>(static_cast<std::size_t>(grid.width), kLine)),
        next(carver.take<std::int32_t>(static_cast<std::size_t>(warps * grid.others()))),
        pairs(carver.take<RailPairs>(RailPairs::of_block(grid, lanes, blocks), kLine)),
        near_rows(carver.take<std::int32_t>(static_cast<std::size_t>(near_warps == 0 ? 0 : grid.num_ranks))),
        near_next(carver.take<std::int32_t>(static_cast<std::size_t>(near_warps * grid.num_ranks))),
        bytes(carver.bytes()) {}
};

namespace device::internode {

/// Rows that ranks of this node push. The queues are numbered by the rank at their other end and the node whose tokens
/// the rows are of: whoever adds takes the rows of each in their order, and does not wait for one node to get on with
/// another.
struct PushedRows {
  const InternodeCombineParams& params;
  NearQueues queues;

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE int queue(int index, int node) const { return index * grid().nodes() + node; }
  /// Of the rows of `destination`, the first that is of a token of `source`.
  DEEP_EP_DEVICE std::int32_t first_row(int source, int destination) const {
    return source == 0 ? 0 : params.rank_prefix_matrix[(source - 1) * grid().num_ranks + destination];
  }

  /// The number, in its queue, of row `row` of rank `index`, which is of a token of our rail in `node`; -1: it is not
  /// pushed.
  DEEP_EP_DEVICE std::int32_t number_of(const NodeRows* ranks, int index, int node, std::int32_t row) const {
    if (row < 0 || row >= ranks[index].num_rows || !ranks[index].pushed) return -1;
    return row - first_row(grid().rail_in(node), grid().first_of_node() + index);
  }
  DEEP_EP_DEVICE bool is_there(int index, int node, std::int32_t n) const {
    return queues.is_filled(queue(index, node), n);
  }
  DEEP_EP_DEVICE bool await(int index, int node, std::int32_t n) const {
    return wait_signal(params.transfer.wait, queues.filled(queue(index, node), n),
                       {grid().first_of_node() + index, Wanted::internode_near_rows, queues.progress(n)});
  }
  DEEP_EP_DEVICE void report_late(int index, int node, std::int32_t n) const {
    report_fault(params.transfer.wait, FaultKind::timeout, Wanted::internode_near_rows, grid().first_of_node() + index,
                 0, queues.progress(n), load_relaxed<Scope::system>(queues.filled(queue(index, node), n)));
  }
  DEEP_EP_DEVICE const std::byte* row(int index, int node, std::int32_t n) const {
    return queues.slot(queue(index, node), n);
  }
  /// By one lane, when the whole warp has read the row.
  DEEP_EP_DEVICE void give_back(int index, int node, std::int32_t n) const {
    queues.empty(index, queue(grid().index(), node), n);
  }
};

/// Does any rank of this node push?
DEEP_EP_DEVICE bool any_pushed(const NodeRows* ranks, int width) {
  bool found = false;
  for (int index = lane_index(); index < width; index += kWarpSize) found = found || ranks[index].pushed;
  return warp::any(found);
}

/// Where rows lie that are added up.
struct RowPlaces {
  const InternodeCombineParams& params;

  /// A row that lies in a slot, its weights behind it.
  DEEP_EP_DEVICE FoundRow in_slot(const std::byte* slot) const {
    return {slot, reinterpret_cast<const float*>(slot + params.row_bytes)};
  }

  /// Row `row` of a rank of this node, if it has it and lets us read it.
  DEEP_EP_DEVICE FoundRow row_of(const NodeRows& rank, std::int32_t row) const {
    if (row < 0 || row >= rank.num_rows) return {};
    return {rank.x + std::int64_t{row} * params.row_bytes, rank.topk_weights + std::int64_t{row} * params.num_topk};
  }
};

}  // namespace device::internode
}  // namespace deep_ep
