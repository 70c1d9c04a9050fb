// How a rank reaches the others: with stores over NVLink (near), through its NIC (far), or through its NIC and one more
// rank (by rails). A family's own reach, which knows the places of its window, builds on this one and answers where
// things lie and whether they are there. Others ask how a rank is reached only where they do different work for it.
//
// By rails: where nodes have several ranks each, a row crosses the network once for each node, between ranks that have
// the same index in their nodes, and is handed on over NVLink. Nodes are of equally many consecutive ranks.
//
//   one to many   sender -- NIC --> its rail in the other node, the relay -- NVLink --> each rank that wants the row
//   many to one   each rank with a part -- NVLink --> the receiver's rail there, the relay, adds -- NIC --> receiver
//
// A relay hands on within its own call: so either all ranks of a call go by rails or none does.
#pragma once

#include "kernels/common/limits.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

/// What kernels are told of the ranks. Plain data, set by the host.
struct ReachParams {
  int rank = 0;
  Divisor num_ranks;
  std::byte* local = nullptr;  ///< this rank's heap
  /// Heap of every rank as this rank maps it, nullptr for one that is far; readable by kernels.
  std::byte* const* heaps = nullptr;
  const RdmaPeerParams* peers = nullptr;                ///< [channel][num_ranks]; nullptr: nobody is far
  std::uint32_t far_ranks[(kMaxRanks + 31) / 32] = {};  ///< a bit for each
  int num_far = 0;
  int lanes = 1;              ///< to each far rank: queue pairs that rows take in turn, a power of two
  Divisor rail_width = 0;     ///< ranks of a node, where rows of this call go by rails; else 0
  Divisor other_nodes_ranks;  ///< by rails: ranks of other nodes
  /// Blocks of the grid that do all but posting. Those behind them post to far ranks, over one lane in each warp.
  int working_blocks = 0;

  void set_rails(int width) {
    rail_width = width;
    other_nodes_ranks = num_ranks - width;
  }
  void set_far(int far_rank) {
    far_ranks[far_rank / 32] |= 1u << far_rank % 32;
    ++num_far;
  }
};

namespace device {

/// Consecutive ranks.
struct RankRange {
  int first, count;
};

/// What a warp posts to.
struct PostedLane {
  int rank, lane;
};

/// `kRdma` false: nobody is far. `kRails` false: no call goes by rails.
template <bool kRdma, bool kRails = kRdma>
struct Reach {
  const ReachParams& ranks;

  /// A far rank is not mapped here, and does not map this one.
  DEEP_EP_DEVICE bool is_far(int rank) const {
    return kRdma && ranks.peers != nullptr &&
           (ranks.far_ranks[static_cast<unsigned>(rank) / 32] >> static_cast<unsigned>(rank) % 32 & 1) != 0;
  }
  DEEP_EP_DEVICE bool by_rails() const { return kRails && ranks.rail_width != 0; }

  /// Is this a block that posts?
  DEEP_EP_DEVICE bool posts() const { return kRdma && block_index() >= ranks.working_blocks; }
  /// In blocks that post: the far rank that this warp serves, or -1, and over which lane. The first lanes of all ranks
  /// come first.
  DEEP_EP_DEVICE PostedLane posted() const {
    const int index = first_posted() + warp_index();
    if (index >= ranks.num_far * ranks.lanes) return {-1, 0};
    return {far_rank(index % ranks.num_far), index / ranks.num_far};
  }
  /// Has a warp of this block a first lane?
  DEEP_EP_DEVICE bool posts_first_lanes() const { return first_posted() < ranks.num_far; }
  /// The lane that row `number` takes.
  DEEP_EP_DEVICE int lane_of(int number) const { return number & (ranks.lanes - 1); }

  // The others are for calls that go by rails.

  DEEP_EP_DEVICE int num_nodes() const { return by_rails() ? ranks.num_ranks / ranks.rail_width : 1; }
  DEEP_EP_DEVICE int node_of(int rank) const { return rank / ranks.rail_width; }
  DEEP_EP_DEVICE int own_node() const { return node_of(ranks.rank); }
  DEEP_EP_DEVICE bool is_of_own_node(int rank) const { return node_of(rank) == own_node(); }
  /// The rank of `node` that this rank exchanges rows with.
  DEEP_EP_DEVICE int rail_in(int node) const { return node * ranks.rail_width + ranks.rank % ranks.rail_width; }
  /// The rank of this node that exchanges rows with `far_rank`.
  DEEP_EP_DEVICE int relay_of(int far_rank) const {
    return own_node() * ranks.rail_width + far_rank % ranks.rail_width;
  }
  /// Are this rank and `far_rank` those that exchange the rows of their nodes? Also where no rails are: then nobody is.
  DEEP_EP_DEVICE bool has_rail_to(int far_rank) const { return by_rails() && relay_of(far_rank) == ranks.rank; }
  /// The rank whose row stands for that of `rank`: of another node, this rank's rail there. Also where no rails are.
  DEEP_EP_DEVICE int speaker_of(int rank) const {
    return by_rails() && rank >= 0 && !is_of_own_node(rank) ? rail_in(node_of(rank)) : rank;
  }
  /// The ranks that get this rank's rows through far rank `peer`. Also where no rails are: then it is itself.
  DEEP_EP_DEVICE RankRange served_by(int peer) const {
    if (!by_rails()) return {peer, 1};
    return {node_of(peer) * ranks.rail_width, has_rail_to(peer) ? static_cast<int>(ranks.rail_width) : 0};
  }

 private:
  DEEP_EP_DEVICE int first_posted() const { return (block_index() - ranks.working_blocks) * block_warps(); }
  /// The far rank with so many others below it.
  DEEP_EP_DEVICE int far_rank(int number) const {
    int word = 0;
    while (number >= count_bits(ranks.far_ranks[word])) number -= count_bits(ranks.far_ranks[word++]);
    std::uint32_t bits = ranks.far_ranks[word];
    for (; number != 0; --number) bits &= bits - 1;
    return word * 32 + lowest_bit(bits);
  }
};

}  // namespace device
}  // namespace deep_ep
