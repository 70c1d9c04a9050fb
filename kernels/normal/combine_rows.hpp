// The rows of a combine, of this rank's tokens and of those of its rails: ranks of this node hold them in their memory,
// or push them into our local rings. And the shared memory of a block.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/normal/combine_push.hpp"
#include "kernels/normal/transfer.hpp"

namespace deep_ep {

/// The rows of one rank of this node.
struct NodeRows {
  const std::byte* x;  ///< its rows, as mapped here
  const float* topk_weights;
  std::int32_t num_rows;   ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
  std::int32_t first_row;  ///< that is of a token of this rank
  std::int32_t our_rows;   ///< from there on, of our tokens
  bool pushed;             ///< into our local rings; x and topk_weights mean nothing
};

struct CombineShared : TransferShared<NodeRows> {
  PushedPieces* pieces;  ///< of each pushing warp
  WarpStages pipes;      ///< the same
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE CombineShared(Carver carver, const TransferParams& params, int blocks, int stages,
                                    std::uint32_t stage_bytes)
      : TransferShared(carver, params, blocks, params.common.num_ranks),
        pieces(carver.take<PushedPieces>(static_cast<std::size_t>(params.pushing_warps()))),
        pipes(carver, params.pushing_warps(), stages, stage_bytes),
        bytes(pipes.bytes) {}
};

namespace device::normal {

/// Rows that the ranks of this node hold of tokens of this rank, or of its rail in another node.
template <bool kRails>
struct LocalRows {
  const CombineParams& params;
  const NodeRows* ranks;  ///< [width]
  std::uint64_t epoch;
  bool by_rings;  ///< some rank of this node pushes its rows
  bool releases;  ///< and waits for room for some of our tokens' rows

  DEEP_EP_DEVICE LocalRows(const CombineParams& combine, const NodeRows* node_ranks, std::uint64_t call_epoch)
      : params(combine), ranks(node_ranks), epoch(call_epoch), by_rings(false), releases(false) {
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      by_rings |= ranks[index].pushed;
      releases |= ranks[index].pushed && ranks[index].our_rows > params.transfer.local.slots;
    }
    by_rings = warp::any(by_rings);
    releases = warp::any(releases);
  }

  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(params.transfer.common); }

  // Of row `row` of rank `index`, of a token of `node`.

  DEEP_EP_DEVICE bool is_held(int index, std::int32_t row) const { return row >= 0 && row < ranks[index].num_rows; }
  DEEP_EP_DEVICE bool is_pushed(int index, std::int32_t row) const {
    return by_rings && is_held(index, row) && ranks[index].pushed;
  }
  DEEP_EP_DEVICE TokenRing ring(int index, int node) const {
    const bool ours = !kRails || node == grid().node();
    return combine_ring<kRails>(params.transfer, epoch, index, node, ours ? ranks[index].our_rows : INT32_MAX);
  }
  DEEP_EP_DEVICE std::int32_t in_ring(int index, int node, std::int32_t row) const {
    if (!kRails || node == grid().node()) return row - ranks[index].first_row;
    return row - first_row_of(params.transfer, grid().rail_in(node), grid().first_of_node() + index);
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

}  // namespace device::normal
}  // namespace deep_ep
