// The part of every rank's heap for the signals of normal mode between nodes. The same layout on every rank. All of it
// is zero when the buffer is made and never reset: words only grow. Each part has one writer and one reader: a rank of
// the same node, which stores, or this rank's rail in another node, whose NIC writes and adds.
#pragma once

#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/place.hpp"
#include "kernels/internode/rings.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

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

}  // namespace deep_ep
