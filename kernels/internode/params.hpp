// Arguments of the internode kernels. Plain data: host code fills it, kernels read it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/call.hpp"
#include "kernels/common/carver.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/common/limits.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/numbering.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

// The rings that rows cross the network through: for each other node a landing ring, which this rank's rail there
// writes, and a staging ring, which this rank's NIC reads.
//
// A ring has equal chunks, a chunk a few slots, a slot one row with all that belongs to it. Chunk c of a call
// takes the place of chunk c - chunks; none wraps, so a chunk is one RDMA write. Every call divides the same memory by
// its own row size: a ring is written in a call only when its reader has read all rows of the call before.
//
// Chunks take the lanes to a rail in turn: chunk c is number c / lanes of lane c % lanes. A ring has equally many
// chunks of each, so chunk c takes the place of one of its own lane.

struct Rings {
  static constexpr int kMostChunks = 256;                          ///< of a ring: each has counters
  static constexpr int kRows = 16;                                 ///< of a chunk, where there is room
  static constexpr int kShareRows = 2;                             ///< of a chunk, that a warp takes at once
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;  ///< of a chunk of several rows: one RDMA write

  std::size_t begin = 0;       ///< offset in the heap: landing rings, then staging rings
  std::size_t ring_bytes = 0;  ///< whole lines
  int others = 0;              ///< other nodes
  std::uint32_t slot_bytes = 0;
  Divisor chunk_rows = 1;
  Divisor chunks = 0;
  Divisor shares = 1;  ///< of a chunk
  Divisor lanes = 1;   ///< that a call's chunks take: a power of two; a ring holds two chunks of each, or more

  /// For rows of `row_bytes`, all included, in memory of `bytes` bytes. chunks is 0 where two do not fit. `lanes`:
  /// there are so many; fewer are taken where a ring does not hold two chunks of each.
  static Rings make(std::size_t begin, std::size_t bytes, int others, std::size_t row_bytes, int lanes = 1) {
    Rings rings;
    rings.begin = begin;
    rings.others = others;
    rings.ring_bytes = bytes / static_cast<std::size_t>(2 * others) / kLine * kLine;
    rings.slot_bytes = static_cast<std::uint32_t>(align_to_line(row_bytes));
    const std::size_t slots = rings.ring_bytes / rings.slot_bytes;
    constexpr std::size_t kFewChunks = 4;
    int rows = slots >= kFewChunks * kRows ? kRows : slots < kFewChunks ? 1 : static_cast<int>(slots / kFewChunks);
    while (rows > 1 && rings.slot_bytes * static_cast<std::size_t>(rows) > kMostBytes) rows /= 2;
    const std::size_t fit = slots / static_cast<std::size_t>(rows);
    const int chunks = fit < 2 ? 0 : fit > kMostChunks ? kMostChunks : static_cast<int>(fit);
    while (lanes > 1 && chunks < 2 * lanes) lanes /= 2;
    rings.chunk_rows = rows;
    rings.shares = (rows + kShareRows - 1) / kShareRows;
    rings.chunks = chunks - chunks % lanes;
    rings.lanes = lanes;
    return rings;
  }

  DEEP_EP_HOST_DEVICE int chunk_of(int row) const { return row / chunk_rows; }
  DEEP_EP_HOST_DEVICE int chunks_for(int rows) const { return (rows + chunk_rows - 1) / chunk_rows; }
  /// Rows of chunk `chunk` where there are `rows` in all.
  DEEP_EP_HOST_DEVICE int rows_in(int chunk, int rows) const {
    const int rest = rows - chunk * chunk_rows;
    return rest < chunk_rows ? rest : int{chunk_rows};
  }
  // Of lanes.
  DEEP_EP_HOST_DEVICE int lane_of(int chunk) const { return chunk & (lanes - 1); }
  DEEP_EP_HOST_DEVICE int in_lane(int chunk) const { return chunk / lanes; }
  DEEP_EP_HOST_DEVICE int chunk_in(int lane, int number) const { return number * lanes + lane; }
  /// Chunks of a lane where there are `rows` rows in all.
  DEEP_EP_HOST_DEVICE int chunks_for(int rows, int lane) const {
    return lane < lanes ? (chunks_for(rows) + lanes - 1 - lane) / lanes : 0;
  }
  /// The counter of a chunk, of one node's.
  DEEP_EP_HOST_DEVICE int counter(int number, int chunk) const { return number * kMostChunks + chunk % chunks; }

  /// Of other node `number`.
  DEEP_EP_HOST_DEVICE Place<std::byte> landing(int number, int row) const { return slot(number, row); }
  DEEP_EP_HOST_DEVICE Place<std::byte> staging(int number, int row) const { return slot(others + number, row); }

  // Both ends count the chunks of a lane, of which a ring holds held().

  DEEP_EP_HOST_DEVICE int held() const { return in_lane(chunks); }
  /// How far a lane has come with its chunk `chunk` of call `call` (from 0).
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t through(std::uint64_t call, int chunk) {
    return Progress::at(call, static_cast<std::uint32_t>(chunk) + 1);
  }
  /// How far it must have been read before chunk `chunk` may be written.
  DEEP_EP_HOST_DEVICE std::uint64_t room_for(std::uint64_t call, int chunk) const {
    return chunk < held() ? Progress::at(call) : through(call, chunk - held());
  }

 private:
  DEEP_EP_HOST_DEVICE Place<std::byte> slot(int ring, int row) const {
    const int at = chunk_of(row) % chunks * chunk_rows + row % chunk_rows;
    return {begin + static_cast<std::size_t>(ring) * ring_bytes + static_cast<std::size_t>(at) * slot_bytes};
  }
};

/// The last part of the window: rings between ranks of one node, for rows that one of them cannot write into place, or
/// read where they are, because the heap of the other had no room for them. A ring has one writer and one reader. Row n
/// passes through slot n % slots; a slot has two words, which say how far its rows have come (TokenRing).
struct LocalRings {
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20;
  static constexpr int kSlotsOfRank = 32;  ///< at most, for each rank of the buffer

  std::size_t begin = 0;  ///< offset in the heap
  std::uint32_t slot_bytes = 0;
  Divisor slots = 0;  ///< of a ring; 0: there is no room for one in each

  /// How much of a window of `window_bytes` they take. Calls divide the rest differently, so it stays where it is.
  static std::size_t bytes_of(std::size_t window_bytes) {
    return std::min(window_bytes / 4, kMostBytes) / kLine * kLine;
  }
  /// `bytes` bytes for `rings` rings, among `num_ranks` ranks.
  static LocalRings make(std::size_t begin, std::size_t bytes, int rings, int num_ranks, std::uint32_t slot_bytes) {
    const std::size_t fit = bytes / slot_bytes / static_cast<std::size_t>(rings);
    const std::size_t most = static_cast<std::size_t>(num_ranks) * kSlotsOfRank / static_cast<std::size_t>(rings);
    return {begin, slot_bytes, static_cast<int>(std::min(fit, most))};
  }

  /// The number, among all slots, of that of row `n`.
  DEEP_EP_HOST_DEVICE int slot_of(int ring, std::int32_t n) const { return ring * slots + n % slots; }
  DEEP_EP_HOST_DEVICE Place<std::byte> slot(int ring, std::int32_t n) const {
    return {begin + static_cast<std::size_t>(slot_of(ring, n)) * slot_bytes};
  }
};

// The part of every rank's heap for the signals of normal mode between nodes. The same layout on every rank. All of it
// is zero when the buffer is made and never reset: words only grow. Each part has one writer and one reader: a rank of
// the same node, which stores, or this rank's rail in another node, whose NIC writes and adds.

/// A lane is a pair of queue pairs to a rail, with words of its own: chunk c of a call goes by lane c modulo the lanes.
constexpr int kMostInternodeLanes = 4;

/// Nodes of equally many consecutive ranks, as one rank sees them. A rank's rails are the ranks with its index.
struct NodeGrid {
  int rank = 0;
  int num_ranks = 0;
  Divisor width = 1;  ///< ranks of a node

  DEEP_EP_HOST_DEVICE int nodes() const { return num_ranks / width; }
  DEEP_EP_HOST_DEVICE int node() const { return rank / width; }
  DEEP_EP_HOST_DEVICE int index() const { return rank % width; }
  DEEP_EP_HOST_DEVICE int first_of_node() const { return rank - index(); }
  DEEP_EP_HOST_DEVICE int rail_in(int node) const { return node * width + index(); }

  // The other nodes are numbered from the next one on, so that not all ranks begin with the same.
  DEEP_EP_HOST_DEVICE int others() const { return nodes() - 1; }
  DEEP_EP_HOST_DEVICE int other(int number) const { return around(node() + 1 + number); }
  DEEP_EP_HOST_DEVICE int number_of(int other) const { return around(other - node() - 1 + nodes()); }
  /// The number that this node has at node `other`.
  DEEP_EP_HOST_DEVICE int number_at(int other) const { return around(node() - other - 1 + nodes()); }

  /// `node`, below twice as many as there are, modulo the nodes.
  DEEP_EP_HOST_DEVICE int around(int node) const {
    const int all = nodes();
    return node < all ? node : node - all;
  }
};

/// One source's counts: as it stages them for its rails (experts of all ranks), as they land at a rail (experts of the
/// rail's node), and as a rank reads them (its own experts).
struct SourceCounts {
  CallShape* shape;
  std::int32_t* tokens_per_rank;    ///< [num_ranks]: tokens that the source sends to each rank
  std::int32_t* tokens_per_node;    ///< [nodes]: and to each node
  std::int32_t* tokens_per_expert;  ///< [experts]: entries that name each expert
  std::size_t head_bytes;           ///< of all before the experts
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE SourceCounts(Carver carver, const NodeGrid& grid, int experts)
      : shape(carver.take<CallShape>()),
        tokens_per_rank(carver.take<std::int32_t>(static_cast<std::size_t>(grid.num_ranks))),
        tokens_per_node(carver.take<std::int32_t>(static_cast<std::size_t>(grid.nodes()))),
        tokens_per_expert(carver.take<std::int32_t>(static_cast<std::size_t>(experts), kLine)),
        head_bytes(static_cast<std::size_t>(reinterpret_cast<std::byte*>(tokens_per_expert) -
                                            reinterpret_cast<std::byte*>(shape))),
        bytes(align_to_line(carver.bytes())) {}
};

struct InternodeWindow {
  std::size_t begin = 0;
  std::size_t bytes = 0;  ///< 0: there are no calls between nodes

  static InternodeWindow make(std::size_t begin, const NodeGrid& grid, int max_local_experts) {
    const auto ranks = static_cast<std::size_t>(grid.num_ranks);
    const auto width = static_cast<std::size_t>(grid.width);
    const auto nodes = static_cast<std::size_t>(grid.nodes());
    InternodeWindow window;
    window.grid_ = grid;
    window.max_local_experts_ = max_local_experts;
    window.begin = begin;
    Carver carver = Carver::without_memory();
    carver.place<std::byte>(begin);
    window.dispatch_boxes_ = carver.place<Mailbox<DispatchAddresses>>(width);
    window.combine_boxes_ = carver.place<Mailbox<CombineAddresses>>(width);
    window.done_ = carver.place<std::byte>(width * kLine, kLine);
    window.counts_there_ = carver.place<std::byte>(ranks * kLine, kLine);
    window.rail_words_ = carver.place<std::byte>(kMostInternodeLanes * kRailWords * nodes * kLine, kLine);
    window.counts_ = carver.place<std::byte>(2 * ranks * window.counts_bytes(1), kLine);
    window.landed_counts_ = carver.place<std::byte>(2 * nodes * window.counts_bytes(grid.width), kLine);
    const std::size_t slots = ranks * LocalRings::kSlotsOfRank;
    window.published_ = carver.place<std::byte>(slots * sizeof(std::uint64_t), kLine);
    window.released_ = carver.place<std::byte>(slots * sizeof(std::uint64_t), kLine);
    window.staged_counts_ = carver.place<std::byte>(window.counts_bytes(grid.num_ranks), kLine);
    window.bytes = align_to_line(carver.bytes()) - begin;
    return window;
  }

  // By ranks of this node: by their index in it.

  DEEP_EP_DEVICE Mailbox<DispatchAddresses>& dispatch_box(std::byte* heap, int index) const {
    return reinterpret_cast<Mailbox<DispatchAddresses>*>(heap + dispatch_boxes_)[index];
  }
  DEEP_EP_DEVICE Mailbox<CombineAddresses>& combine_box(std::byte* heap, int index) const {
    return reinterpret_cast<Mailbox<CombineAddresses>*>(heap + combine_boxes_)[index];
  }
  /// How many calls that move rows the rank has ended.
  DEEP_EP_DEVICE std::uint64_t* done(std::byte* heap, int index) const { return word(heap, done_, index); }
  /// The number of notifies whose counts of `source` have come. Written by the rank of this node with its index.
  DEEP_EP_DEVICE std::uint64_t* counts_there(std::byte* heap, int source) const {
    return word(heap, counts_there_, source);
  }
  /// Its counts in call `epoch`. Two in turn: a source may be one call ahead, never two.
  DEEP_EP_DEVICE SourceCounts counts(std::byte* heap, std::uint64_t epoch, int source) const {
    const std::size_t at = (epoch & 1) * static_cast<std::size_t>(grid_.num_ranks) + static_cast<std::size_t>(source);
    return {Carver(heap + counts_ + at * counts_bytes(1)), grid_, max_local_experts_};
  }

  /// Of each slot of the local rings that the rank reads: how far the rows that were stored in it have come.
  DEEP_EP_DEVICE std::uint64_t* published(std::byte* heap) const {
    return reinterpret_cast<std::uint64_t*>(heap + published_);
  }
  /// Of each slot that the rank writes: how far the rows that were read have come.
  DEEP_EP_DEVICE std::uint64_t* released(std::byte* heap) const {
    return reinterpret_cast<std::uint64_t*>(heap + released_);
  }

  // Written by this rank's rails: by their nodes. There is one for each lane, but of `notified` one for all.

  enum RailWord : int { notified, shape, tail, head };
  static constexpr std::size_t kRailWords = 4;
  DEEP_EP_DEVICE Place<std::uint64_t> rail_word(RailWord which, int node, int lane = 0) const {
    const int word = lane * static_cast<int>(kRailWords) + which;
    return {rail_words_ + static_cast<std::size_t>(word * grid_.nodes() + node) * kLine};
  }
  DEEP_EP_DEVICE Place<std::byte> landed_counts(std::uint64_t epoch, int node) const {
    const std::size_t at = (epoch & 1) * static_cast<std::size_t>(grid_.nodes()) + static_cast<std::size_t>(node);
    return {landed_counts_ + at * counts_bytes(grid_.width)};
  }

  /// Memory that this rank's NIC reads.
  DEEP_EP_DEVICE Place<std::byte> staged_counts() const { return {staged_counts_}; }
  DEEP_EP_HOST_DEVICE SourceCounts counts_at(std::byte* memory, int ranks) const {
    return {Carver(memory), grid_, ranks * max_local_experts_};
  }

 private:
  DEEP_EP_HOST_DEVICE std::size_t counts_bytes(int ranks) const {
    return SourceCounts(Carver::without_memory(), grid_, ranks * max_local_experts_).bytes;
  }
  DEEP_EP_DEVICE static std::uint64_t* word(std::byte* heap, std::size_t words, int index) {
    return reinterpret_cast<std::uint64_t*>(heap + words + static_cast<std::size_t>(index) * kLine);
  }

  NodeGrid grid_;
  int max_local_experts_ = 0;
  std::size_t dispatch_boxes_ = 0, combine_boxes_ = 0, done_ = 0, counts_there_ = 0, rail_words_ = 0, counts_ = 0,
              landed_counts_ = 0, staged_counts_ = 0, published_ = 0, released_ = 0;
};

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
  int weights_as_scales;     ///< the last ones of num_scales: weights of a token, from topk_weights
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
