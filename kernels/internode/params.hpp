// Arguments of the internode kernels. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "kernels/common/call.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/common/numbering.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/internode/rings.hpp"
#include "kernels/internode/window.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

/// Queue pairs of a lane to a rail. Credit has its own, so that it does not wait behind rows.
enum class InternodeChannel : int { rows, credit, count };

/// This rank's state of a lane to its rail in another node. (That of counts is in the first lane's.)
struct alignas(kLine) RailState {
  std::uint64_t notified, shape, tail, head;  ///< the words at the rail, once all that was posted has arrived
  std::uint64_t sent;                         ///< Progress: chunks whose staging memory the NIC has read
};

/// This rank's own counters, in device memory. Zero when the buffer is made.
struct InternodeState {
  CallCounter notify, transfer;  ///< transfer: dispatches and combines, which share the rings
  std::uint32_t notify_ticket;
  std::uint32_t next_token;  ///< that a warp may take; zero between calls
};

/// Arguments of every kernel of the family.
struct InternodeParams {
  NodeGrid grid;
  std::byte* const* heaps = nullptr;  ///< of every rank of this node as this rank maps it; nullptr for the others
  InternodeWindow window;
  int lanes = 1;                          ///< to each rail; a power of two
  const RdmaPeerParams* peers = nullptr;  ///< [lanes][InternodeChannel][num_ranks]
  InternodeState* state = nullptr;
  RailState* rails = nullptr;  ///< [lanes][other nodes], by number
  /// [other nodes][Rings::kMostChunks]: rows of a chunk that are staged, and rows of a landed chunk that are read. Set
  /// back to zero when the chunk has been sent, or read.
  std::uint32_t* staged = nullptr;
  std::uint32_t* read = nullptr;
  std::uint32_t* local_tickets = nullptr;  ///< [width]: rows of a dispatch for a local ring; zero between calls

  DEEP_EP_DEVICE std::byte* own_heap() const { return heaps[grid.rank]; }
  DEEP_EP_DEVICE std::byte* heap_of(int index) const { return heaps[grid.first_of_node() + index]; }
  DEEP_EP_DEVICE const RdmaPeerParams& queue_pair(InternodeChannel channel, int node, int lane = 0) const {
    const int queue_pairs = lane * static_cast<int>(InternodeChannel::count) + static_cast<int>(channel);
    return peers[queue_pairs * grid.num_ranks + grid.rail_in(node)];
  }
};

struct InternodeNotifyParams : NotifyCall {
  InternodeParams common;
  std::int32_t* node_row;     ///< out, [num_tokens, nodes]
  std::int32_t* node_counts;  ///< out, [2, nodes]: see NodeCounts
};

struct InternodeNotifyShared {
  device::Numbering numbering;
  std::int32_t scratch;
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

/// Arguments that dispatch and combine have in common.
struct TransferParams {
  InternodeParams common;
  WaitContext wait;
  Rings rings;
  LocalRings local;
  NodeCounts counts;
  const std::int32_t* destination_row;  ///< [num_tokens, num_ranks]
  const std::int32_t* node_row;         ///< [num_tokens, nodes]
  int num_tokens;
  std::uint32_t shape;           ///< of the rows, as combine_shapes() makes it: must be equal on all ranks
  std::int64_t relay_rows_room;  ///< rows of relay_rows
  // Roles of a block's warps, in this order.
  int first_warps;   ///< dispatch: send; combine: add this rank's tokens
  int second_warps;  ///< dispatch: forward; combine: add for other nodes
  int local_warps;   ///< 0 where this rank's rows lie in the heap; dispatch: fetch its rows; combine: push them
  int poster_warps;  ///< a thread posts to one lane of one rail

  DEEP_EP_HOST_DEVICE int moving_warps() const { return first_warps + second_warps; }
};

/// Queue pairs of a lane to a rail, copied into shared memory: a poster needs them for every entry.
struct RailPairs {
  RdmaPeerParams channel[static_cast<int>(InternodeChannel::count)];

  DEEP_EP_DEVICE const RdmaPeerParams& operator[](InternodeChannel at) const { return channel[static_cast<int>(at)]; }
};

/// Shared memory of a block that moves rows. `Rank`: what the block knows of a rank of its node.
template <class Rank>
struct TransferShared {
  std::int32_t* scratch;
  Rank* ranks;               ///< [width]
  std::int32_t* next;        ///< [moving warps][other nodes]
  RailPairs* pairs;          ///< [lanes of rails that the block posts to]
  std::int32_t* local_rows;  ///< [local rings]: rows of this rank in each, if they do not lie in the heap
  std::int32_t* local_next;  ///< [local warps][local rings]

  DEEP_EP_HOST_DEVICE TransferShared(Carver& carver, const TransferParams& params, int blocks, int local_rings)
      : scratch(carver.take<std::int32_t>()),
        ranks(carver.take<Rank>(static_cast<std::size_t>(params.common.grid.width), kLine)),
        next(carver.take<std::int32_t>(static_cast<std::size_t>(params.moving_warps() * params.common.grid.others()))),
        pairs(carver.take<RailPairs>(
            static_cast<std::size_t>((params.common.grid.others() * params.common.lanes + blocks - 1) / blocks),
            kLine)),
        local_rows(carver.take<std::int32_t>(static_cast<std::size_t>(params.local_warps == 0 ? 0 : local_rings))),
        local_next(carver.take<std::int32_t>(static_cast<std::size_t>(params.local_warps * local_rings))) {}
};

/// With send_src_idx, forwarders also note where the rows go.
struct InternodeDispatchParams : SentRows {
  TransferParams transfer;
  const std::int32_t* rank_prefix_matrix;  ///< [num_ranks, num_ranks]

  // Where this rank receives.
  RowTargets output;         ///< final places; in the heap, unless there are local_warps
  std::int64_t output_rows;  ///< rows there is room for
  std::int32_t* relay_rows;  ///< out, [relay_rows_room, width]

  std::uint32_t stage_bytes;  ///< a row travels in pieces of at most this size, multiple of 128
  int stages;                 ///< of a warp, 2..8
};

struct InternodeCombineParams {
  TransferParams transfer;

  // As owner: what is added up.
  std::uint32_t row_bytes;   ///< 2 * hidden, multiple of 16
  const std::byte* bias[2];  ///< nullptr: none
  std::byte* combined_x;     ///< out, [num_tokens] rows
  float* combined_weights;   ///< out, [num_tokens, num_topk], nullptr: none
  int num_topk;

  // As expert side: where the rows are; in the heap, unless there are local_warps.
  std::int32_t num_rows;
  const std::byte* x;
  const float* topk_weights;
  const std::int32_t* relay_rows;          ///< [relay_rows_room, width]
  const std::int32_t* rank_prefix_matrix;  ///< [num_ranks, num_ranks]
};

}  // namespace deep_ep
