#include "csrc/memory/node_membership.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep {
namespace {

using Node = std::vector<int>;
using PerRank = std::function<int(int rank)>;

/// What every rank finds; `host` says which ranks share memory. A text where a rank throws.
struct Found {
  std::vector<NodeMembership> memberships;
  std::vector<std::string> thrown;
};

Found find(int ranks, const PerRank& host, int ranks_per_node) {
  std::vector<int> domains;
  for (int rank = 0; rank < ranks; ++rank) {
    int lowest = 0;
    while (host(lowest) != host(rank)) ++lowest;
    domains.push_back(lowest);
  }
  Found found{std::vector<NodeMembership>(domains.size()), std::vector<std::string>(domains.size())};
  for (int rank = 0; rank < ranks; ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    try {
      const int width = asked_for_ranks_per_node(ranks_per_node, ranks);
      found.memberships[place] = NodeMembership::of_domains(rank, domains, width);
    } catch (const Error& error) {
      found.thrown[place] = error.what();
    }
  }
  return found;
}

PerRank always(int value) {
  return [value](int) { return value; };
}

TEST(NodeMembership, RanksThatMapEachOtherAreANode) {
  const Found found = find(
      6, [](int rank) { return rank % 2; }, 0);
  for (std::size_t rank = 0; rank < 6; ++rank) {
    ASSERT_EQ(found.thrown[rank], "");
    EXPECT_EQ(found.memberships[rank].node, (Node{0, 1, 0, 1, 0, 1}));
    EXPECT_EQ(found.memberships[rank].num_nodes, 2);
    EXPECT_EQ(found.memberships[rank].rank, static_cast<int>(rank));
  }
  EXPECT_EQ(found.memberships[3].reached_by_rdma(true), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(found.memberships[3].reached_by_rdma(false), (std::vector<int>{0, 1, 2, 4, 5}));
  EXPECT_TRUE(found.memberships[3].same_node(5));
  EXPECT_FALSE(found.memberships[3].same_node(4));
}

TEST(NodeMembership, RanksOfEachNodeWhereAllNodesAreAlike) {
  const auto width = [](const PerRank& host, int ranks) {
    const Found found = find(ranks, host, 0);
    const int of_first = found.memberships[0].ranks_of_each_node();
    for (const NodeMembership& membership : found.memberships) EXPECT_EQ(membership.ranks_of_each_node(), of_first);
    return of_first;
  };
  EXPECT_EQ(width([](int rank) { return rank / 2; }, 6), 2);
  EXPECT_EQ(width([](int rank) { return rank / 3; }, 6), 3);
  EXPECT_EQ(width([](int rank) { return 9 - rank / 4; }, 8), 4) << "nodes count in the order of their ranks";
  EXPECT_EQ(width([](int rank) { return rank; }, 3), 1);
  EXPECT_EQ(find(8, always(0), 4).memberships[5].ranks_of_each_node(), 4) << "one host plays two nodes";
  EXPECT_EQ(width(always(0), 4), 0) << "one node";
  EXPECT_EQ(width(always(0), 1), 0);
  EXPECT_EQ(width([](int rank) { return rank / 4; }, 6), 0) << "four and two";
  EXPECT_EQ(width([](int rank) { return rank / 4; }, 5), 0) << "four and one";
  EXPECT_EQ(width([](int rank) { return rank % 2; }, 4), 0) << "not consecutive";
  EXPECT_EQ(width([](int rank) { return rank == 1 || rank == 2 ? 1 : 0; }, 4), 0) << "not consecutive";
}

TEST(NodeMembership, TheVariableCountsWhereTheProgramDoesNotSay) {
  const Setting two("DEEP_EP_RANKS_PER_NODE", "2");
  EXPECT_EQ(find(4, always(0), 0).memberships[0].num_nodes, 2);
  EXPECT_EQ(find(4, always(0), 4).memberships[0].num_nodes, 1);
  const Setting five("DEEP_EP_RANKS_PER_NODE", "5");
  EXPECT_EQ(find(4, always(0), 0).thrown[0],
            "environment variable DEEP_EP_RANKS_PER_NODE is 5, allowed: 0 (by host), or a number that divides the 4 "
            "ranks");
}

TEST(NodeMembership, Refusals) {
  EXPECT_EQ(find(4, always(0), 3).thrown[2],
            "ranks_per_node is 3, allowed: 0 (by host), or a number that divides the 4 ranks");
  EXPECT_EQ(find(4, always(0), -1).thrown[2],
            "ranks_per_node is -1, allowed: 0 (by host), or a number that divides the 4 ranks");
  for (const std::string& text : find(
                                     4, [](int rank) { return rank / 3; }, 2)
                                     .thrown) {
    EXPECT_EQ(text, "ranks_per_node is 2, but ranks 2 and 3 of such a node cannot map each other's memory");
  }
}

}  // namespace
}  // namespace deep_ep
