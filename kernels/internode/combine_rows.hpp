// Where the rows of a combine are: at the ranks of this node, which let us read them, and, summed up by each other
// node, in the landing rings.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/internode/serving.hpp"

namespace deep_ep {

/// What is known of one rank of this node.
struct NodeRows {
  const std::byte* x;  ///< its rows, as mapped here
  const float* topk_weights;
  std::int32_t num_rows;  ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
};

struct InternodeCombineShared {
  std::int32_t* scratch;
  NodeRows* ranks;     ///< [width]
  std::int32_t* next;  ///< [warps][other nodes]
  RailPairs* pairs;    ///< [rails of the block]
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE InternodeCombineShared(Carver carver, const NodeGrid& grid, int blocks, int warps)
      : scratch(carver.take<std::int32_t>()),
        ranks(carver.take<NodeRows>(static_cast<std::size_t>(grid.width), kLine)),
        next(carver.take<std::int32_t>(static_cast<std::size_t>(warps * grid.others()))),
        pairs(carver.take<RailPairs>(RailPairs::of_block(grid, blocks), kLine)),
        bytes(carver.bytes()) {}
};

namespace device::internode {

/// A row's bytes and its weights; `x` nullptr: there is none.
struct FoundRow {
  const std::byte* x = nullptr;
  const float* weights = nullptr;
};

/// Adds up found rows, piece by piece, and their weights. `find(lane's index + multiples of 32)` finds a row; there are
/// `most`, added in the order of their indices. `begin(sum, offset, vectors)` comes before.
struct RowAdder {
  const InternodeCombineParams& params;

  template <class Find, class Begin>
  DEEP_EP_DEVICE void add(std::byte* to, float* weights_to, int most, Find find, Begin begin) const {
    const FoundRow first = find(lane_index());
    const std::uint32_t holders = warp::ballot(first.x != nullptr);
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += RowSum::kPieceBytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const int vectors = static_cast<int>((rest < RowSum::kPieceBytes ? rest : RowSum::kPieceBytes) / sizeof(Vec16));
      RowSum sum;
      begin(sum, offset, vectors);
      sum.add_rows(reinterpret_cast<std::uint64_t>(first.x), holders, offset, vectors);
      for (int at = kWarpSize; at < most; at += kWarpSize) {
        const FoundRow later = find(at + lane_index());
        sum.add_rows(reinterpret_cast<std::uint64_t>(later.x), warp::ballot(later.x != nullptr), offset, vectors);
      }
      sum.store(to + offset, vectors);
    }
    if (weights_to == nullptr) return;
    float weight = add_weights(0, reinterpret_cast<std::uint64_t>(first.weights), holders, params.num_topk);
    for (int at = kWarpSize; at < most; at += kWarpSize) {
      const FoundRow later = find(at + lane_index());
      weight = add_weights(weight, reinterpret_cast<std::uint64_t>(later.weights), warp::ballot(later.x != nullptr),
                           params.num_topk);
    }
    if (lane_index() < params.num_topk) weights_to[lane_index()] = weight;
  }

  /// Row `row` of rank `index` of this node, if it has it.
  DEEP_EP_DEVICE FoundRow row_of(const NodeRows& rank, std::int32_t row) const {
    if (row < 0 || row >= rank.num_rows) return {};
    return {rank.x + std::int64_t{row} * params.row_bytes, rank.topk_weights + std::int64_t{row} * params.num_topk};
  }
};

}  // namespace device::internode
}  // namespace deep_ep
