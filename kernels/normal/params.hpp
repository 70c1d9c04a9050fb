// Arguments of the kernels of normal mode. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "kernels/common/row_pipe.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/normal/node.hpp"
#include "kernels/normal/rings.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

/// Queue pairs to a rail: one of each lane for rows, then one for credit, so that it does not wait behind rows.
enum class InternodeChannel : int { rows, credit, count };

/// This rank's state of a place in the rings of another node.
struct ChunkState {
  std::uint64_t sent;  ///< Rings::through() of the chunk that was last sent from the place, which is free again
  // Rows of a chunk that are staged, and rows of a landed chunk that are read. Set back to zero when the chunk has been
  // sent, or when credit is given for it.
  std::uint32_t staged, read;
};

/// This rank's state of its rail in another node.
struct alignas(kLine) RailState {
  /// The words at the rail, once all that was posted has arrived.
  std::uint64_t notified, head, shape[kMostInternodeLanes], landed[ControlWindow::kMostChunks];
  std::uint32_t next_chunk;  ///< that a lane takes; zero between calls
  ChunkState chunks[ControlWindow::kMostChunks];
};

/// What notify, dispatch and combine get. In one node: a grid of one, and no rails.
struct NormalParams : IntranodeParams {
  NodeGrid grid;
  int lanes = 1;                         ///< to each rail
  const RdmaQueuePair* peers = nullptr;  ///< [lanes, credit][num_ranks]
  RailState* rails = nullptr;            ///< [other nodes], by number

  DEEP_EP_DEVICE const RdmaQueuePair& queue_pair(InternodeChannel channel, int node, int lane = 0) const {
    const int queue_pair = channel == InternodeChannel::credit ? lanes : lane;
    return peers[queue_pair * num_ranks + grid.rail_in(node)];
  }
};

/// The nodes, for code that exists with and without rails.
template <bool kRails>
DEEP_EP_DEVICE decltype(auto) grid_of(const NormalParams& common) {
  if constexpr (kRails) {
    return (common.grid);
  } else {
    return OneNode{common.rank, common.num_ranks, common.num_ranks};
  }
}

struct NotifyParams {
  NormalParams common;
  CallShape shape;
  int num_tokens;
  int num_local_experts;
  int expert_alignment;
  const std::uint8_t* is_token_in_rank;       ///< [num_tokens, num_ranks]
  const std::int32_t* num_tokens_per_expert;  ///< [num_experts]
  std::int32_t* destination_row;              ///< out, [num_tokens, num_ranks]
  std::int32_t* rank_prefix_matrix;           ///< out, [num_ranks, width]
  HostCounts* host_counts;                    ///< out, nullptr when the host does not wait
  // Between nodes.
  std::int32_t* node_row;     ///< out, [num_tokens, nodes]
  std::int32_t* node_counts;  ///< out, [2, nodes]: see NodeCounts
};

/// Rows that cross the network in a call, by nodes: what the handle's node_counts say.
struct NodeCounts {
  const std::int32_t* to_node;    ///< tokens of this rank for each node
  const std::int32_t* from_node;  ///< tokens of this rank's rail in each node for this one
};

/// A number that is made of two others, and differs, almost always, if one of them does.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t combine_shapes(std::uint32_t first, std::uint32_t second) {
  return (first ^ second) * 0x9e3779b1u ^ first >> 15;
}

struct TransferParams {
  NormalParams common;
  LocalRings local;
  const std::int32_t* destination_row;     ///< [num_tokens, num_ranks]
  const std::int32_t* rank_prefix_matrix;  ///< [num_ranks, width]
  int num_tokens;

  // Between nodes.
  Rings rings;
  NodeCounts counts;
  const std::int32_t* node_row;  ///< [num_tokens, nodes]
  std::uint32_t shape;           ///< of the rows, as combine_shapes() makes it: must be equal on all ranks
  std::int32_t* relay_rows;      ///< [relay_rows_room, width]: see DispatchHandle; a first dispatch writes them
  std::int64_t relay_rows_room;

  // Roles of a block's warps, in this order.
  int first_warps;   ///< dispatch: send; combine: add this rank's tokens
  int second_warps;  ///< 0 in one node; dispatch: forward; combine: add for other nodes
  int local_warps;   ///< 0 where other ranks reach this rank's rows; dispatch: fetch its rows; combine: push them
  int posters;       ///< threads, each of which posts to one lane of one rail

  PipeShape pipe;  ///< of a dispatch's moving warp, in shared memory

  DEEP_EP_DEVICE ChunkState& chunk_state(int number, int chunk) const {
    return common.rails[number].chunks[chunk % rings.chunks];
  }
  /// Of the rows of rank `index` of this node: where those of rank `source` begin and end.
  DEEP_EP_DEVICE std::int32_t first_row_of(int source, int index) const {
    return source == 0 ? 0 : end_of(source - 1, index);
  }
  DEEP_EP_DEVICE std::int32_t end_of(int source, int index) const {
    return rank_prefix_matrix[source * common.grid.width + index];
  }
  DEEP_EP_HOST_DEVICE int warps() const { return moving_warps() + local_warps + poster_warps(); }
  DEEP_EP_HOST_DEVICE int poster_warps() const { return (posters + 31) / 32; }
  DEEP_EP_HOST_DEVICE int moving_warps() const { return first_warps + second_warps; }
};

/// A poster's memory, shared: copies of its lane's queue pairs, needed for every entry, and the chunks under way.
struct RailPairs {
  static constexpr int kMostUnderWay = 32;

  RdmaQueuePair rows, credit;
  std::int32_t under_way[kMostUnderWay];  ///< of several lanes: place n is that of the lane's chunk n
};

/// Shared memory of a block that moves rows. `Rank`: what the block knows of a rank of its node.
template <class Rank>
struct TransferShared {
  Carver carver;
  const TransferParams& params;
  Rank* ranks = carver.take<Rank>(params.common.grid.width, kLine);
  /// [nodes, width]: of the rows of a rank of this node, the first of our rail in a node.
  std::int32_t* first_rows = carver.take<std::int32_t>(params.common.num_ranks);
  int local_rings = params.local_warps == 0 ? 0 : params.common.num_ranks;
  /// Rows of this rank in each local ring, if other ranks do not reach them.
  std::int32_t* local_rows = carver.take<std::int32_t>(local_rings);
  int others = params.common.grid.others();
  int served = others < local_rings ? local_rings : others;  ///< by a warp
  /// [moving and local warps][served].
  std::int32_t* next = carver.take<std::int32_t>((params.moving_warps() + params.local_warps) * served);
  RailPairs* pairs = carver.take<RailPairs>(params.posters, kLine);
  std::size_t bytes = carver.bytes();

  DEEP_EP_DEVICE std::int32_t* next_of_warp() const { return next + device::warp_index() * served; }
};

/// The memory for rows at one rank of this node.
struct RankTarget {
  RowTargets rows;         ///< its memory, as mapped here
  std::int32_t capacity;   ///< rows it has room for
  std::int32_t reachable;  ///< the same; 0 where they come by its local rings, and `rows` means nothing
};

struct DispatchShared : TransferShared<RankTarget> {
  WarpStages pipes{carver, params.moving_warps(), params.pipe};  ///< of the moving warps
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
  /// [width]: the row's final place at each rank of the node, -1 where it is not wanted. Across the network goes its
  /// number among the source's rows there instead.
  DEEP_EP_DEVICE std::int32_t* places() const { return src_idx() + 1; }

  static std::size_t bytes(const RowShape& shape, int width) {
    return shape.row_bytes + sizeof(std::int32_t) * (shape.num_scales + 2 * shape.num_topk + 1 + width);
  }
};

/// With send_src_idx, forwarders also note where the rows go.
struct DispatchParams : SentRows {
  TransferParams transfer;

  // Where this rank receives.
  RowTargets output;         ///< final places; other ranks reach them, unless there are local_warps
  std::int64_t output_rows;  ///< rows there is room for
};

struct RankRows {
  const std::byte* x;  ///< its rows, as mapped here
  const float* topk_weights;
  std::int32_t num_rows;  ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
  bool pushed;            ///< into our local rings; x and topk_weights mean nothing
};

using NormalCombineShared = TransferShared<RankRows>;

struct CombineParams {
  TransferParams transfer;

  // As owner: what is added up.
  std::uint32_t row_bytes;   ///< 2 * hidden, multiple of 16
  const std::byte* bias[2];  ///< nullptr: none
  std::byte* combined_x;     ///< out, [num_tokens] rows
  float* combined_weights;   ///< out, [num_tokens, num_topk], nullptr: none
  int num_topk;
  Divisor parts_per_token;  ///< a token is added in so many parts, by different warps; one between nodes

  // As expert side: where the rows are. Other ranks read them in the heap, unless there are local_warps.
  std::int32_t num_rows;
  const std::byte* x;
  const std::byte* shared_x;  ///< what the others read: `x`, or a copy, in which rows of this rank's tokens are missing
  const float* topk_weights;
};

}  // namespace deep_ep
