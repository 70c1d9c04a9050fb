#include "csrc/memory/node_membership.hpp"

#include <algorithm>
#include <cstdint>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
int asked_for_ranks_per_node(int asked, int num_ranks) {
  const std::uint64_t from_environment = environment::unsigned_integer("DEEP_EP_RANKS_PER_NODE");
  const int wanted = asked != 0 ? asked : static_cast<int>(std::min<std::uint64_t>(from_environment, 1 << 30));
  if (wanted != 0 && (wanted < 1 || wanted > num_ranks || num_ranks % wanted != 0)) {
    fail<InvalidArgument>("{} is {}, allowed: 0 (by host), or a number that divides the {} ranks",
                          asked != 0 ? "ranks_per_node" : "environment variable DEEP_EP_RANKS_PER_NODE", wanted,
                          num_ranks);
  }
  return wanted;
}

std::vector<int> NodeMembership::reached_by_rdma(bool use_nvlink) const {
  std::vector<int> ranks;
  for (int other = 0; other < static_cast<int>(node.size()); ++other) {
    if (other != rank && !(use_nvlink && same_node(other))) ranks.push_back(other);
  }
  return ranks;
}

int NodeMembership::ranks_of_each_node() const {
  const int ranks = static_cast<int>(node.size());
  if (num_nodes < 2 || ranks % num_nodes != 0) return 0;
  const int width = ranks / num_nodes;
  for (int other = 0; other < ranks; ++other) {
    if (node[static_cast<std::size_t>(other)] != other / width) return 0;
  }
  return width;
}

NodeMembership NodeMembership::of_domains(int rank, std::span<const int> domains, int ranks_per_node) {
  NodeMembership membership{.rank = rank, .node = {}, .num_nodes = 0};
  std::vector<int>& node = membership.node;
  for (int other = 0; other < std::ssize(domains); ++other) {
    const auto domain = [&](int of) { return domains[static_cast<std::size_t>(of)]; };
    const int first = ranks_per_node == 0 ? domain(other) : other - other % ranks_per_node;  // of its node
    if (domain(other) != domain(first)) {
      fail<InvalidArgument>("ranks_per_node is {}, but ranks {} and {} of such a node cannot map each other's memory",
                            ranks_per_node, first, other);
    }
    node.push_back(first == other ? membership.num_nodes++ : node[static_cast<std::size_t>(first)]);
  }
  return membership;
}

}  // namespace deep_ep
