// Which ranks make a node: those that map each other's heaps.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

struct NodeMembership {
  int rank = 0;           ///< this one
  std::vector<int> node;  ///< of each rank; nodes count in the order of their lowest ranks
  int num_nodes = 1;

  /// Nodes of so many consecutive ranks, which divides `num_ranks`.
  static NodeMembership of_consecutive(int rank, int num_ranks, int ranks_per_node);

  bool same_node(int other) const {
    return node[static_cast<std::size_t>(other)] == node[static_cast<std::size_t>(rank)];
  }
  /// Ranks that this one reaches by RDMA: those of other nodes; all others where NVLink must not be used.
  std::vector<int> reached_by_rdma(bool use_nvlink) const;
  /// Ranks per node, if there are several nodes that all have the same number of consecutive ranks; else 0.
  int ranks_of_each_node() const;
};

/// Collective. `heaps`: SymmetricHeap::peers(), null where a rank could not be mapped.
///
/// ranks_per_node 0: DEEP_EP_RANKS_PER_NODE; where that is 0 too, the ranks that map each other make a node. Otherwise
/// so many consecutive ranks make a node, so that one host can play several. InvalidArgument: it does not divide the
/// number of ranks, or a node would have ranks that cannot map each other. RankMismatch: it is not equal on all ranks.
NodeMembership find_nodes(Bootstrap& bootstrap, std::span<std::byte* const> heaps, int ranks_per_node);

}  // namespace deep_ep
