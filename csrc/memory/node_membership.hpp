// Which ranks make a node: those that map each other's heaps, or as many consecutive ones as the program says.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace deep_ep {

struct NodeMembership {
  int rank = 0;           ///< this one
  std::vector<int> node;  ///< of each rank; nodes count in the order of their lowest ranks
  int num_nodes = 1;

  /// `domains`: of each rank the lowest rank that it shares memory with. `ranks_per_node` 0: these make the nodes.
  /// Otherwise so many consecutive ranks make a node, so that one host can play several. InvalidArgument if a node
  /// would have ranks that cannot map each other.
  static NodeMembership of_domains(int rank, std::span<const int> domains, int ranks_per_node);

  bool same_node(int other) const {
    return node[static_cast<std::size_t>(other)] == node[static_cast<std::size_t>(rank)];
  }
  /// Ranks that this one reaches by RDMA: those of other nodes; all others where NVLink must not be used.
  std::vector<int> reached_by_rdma(bool use_nvlink) const;
  /// Ranks per node, if there are several nodes that all have the same number of consecutive ranks; else 0.
  int ranks_of_each_node() const;
};

/// `asked`, or what DEEP_EP_RANKS_PER_NODE says where that is 0; 0: the ranks that share memory make a node.
/// InvalidArgument where it does not divide the number of ranks.
int asked_for_ranks_per_node(int asked, int num_ranks);

}  // namespace deep_ep
