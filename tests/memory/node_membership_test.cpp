#include "csrc/memory/node_membership.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep {
namespace {

using PerRank = std::function<int(int rank)>;

/// `host` says which ranks share memory.
NodeMembership find(int rank, int ranks, const PerRank& host, int ranks_per_node = 0) {
  std::vector<int> domains;
  for (int one = 0; one < ranks; ++one) {
    int lowest = 0;
    while (host(lowest) != host(one)) ++lowest;
    domains.push_back(lowest);
  }
  return NodeMembership::of_domains(rank, domains, asked_for_ranks_per_node(ranks_per_node, ranks));
}
int one_host(int) { return 0; }

TEST(NodeMembership, RanksThatMapEachOtherAreANode) {
  const NodeMembership found = find(3, 6, [](int rank) { return rank % 2; });
  EXPECT_EQ(found.node, (std::vector{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(found.num_nodes, 2);
  EXPECT_EQ(found.rank, 3);
  EXPECT_EQ(found.reached_by_rdma(true), (std::vector{0, 2, 4}));
  EXPECT_EQ(found.reached_by_rdma(false), (std::vector{0, 1, 2, 4, 5}));
  EXPECT_TRUE(found.same_node(5));
  EXPECT_FALSE(found.same_node(4));
}

TEST(NodeMembership, RanksOfEachNodeWhereAllNodesAreAlike) {
  const auto width = [](const PerRank& host, int ranks) { return find(0, ranks, host).ranks_of_each_node(); };
  EXPECT_EQ(width([](int rank) { return rank / 2; }, 6), 2);
  EXPECT_EQ(width([](int rank) { return rank / 3; }, 6), 3);
  EXPECT_EQ(width([](int rank) { return 9 - rank / 4; }, 8), 4) << "nodes count in the order of their ranks";
  EXPECT_EQ(width([](int rank) { return rank; }, 3), 1);
  EXPECT_EQ(find(5, 8, one_host, 4).ranks_of_each_node(), 4) << "one host plays two nodes";
  EXPECT_EQ(width(one_host, 4), 0) << "one node";
  EXPECT_EQ(width(one_host, 1), 0);
  EXPECT_EQ(width([](int rank) { return rank / 4; }, 6), 0) << "four and two";
  EXPECT_EQ(width([](int rank) { return rank / 4; }, 5), 0) << "four and one";
  EXPECT_EQ(width([](int rank) { return rank % 2; }, 4), 0) << "not consecutive";
  EXPECT_EQ(width([](int rank) { return rank == 1 || rank == 2 ? 1 : 0; }, 4), 0) << "not consecutive";
}

TEST(NodeMembership, TheVariableCountsWhereTheProgramDoesNotSay) {
  const Setting two("DEEP_EP_RANKS_PER_NODE", "2");
  EXPECT_EQ(find(0, 4, one_host).num_nodes, 2);
  EXPECT_EQ(find(0, 4, one_host, 4).num_nodes, 1);
  const Setting five("DEEP_EP_RANKS_PER_NODE", "5");
  EXPECT_EQ(test::message_of<InvalidArgument>([] { find(0, 4, one_host); }),
            "environment variable DEEP_EP_RANKS_PER_NODE is 5, allowed: 0 (by host), or a number that divides the 4 "
            "ranks");
}

TEST(NodeMembership, Refusals) {
  for (const int wrong : {3, -1}) {
    EXPECT_EQ(
        test::message_of<InvalidArgument>([&] { find(2, 4, one_host, wrong); }),
        "ranks_per_node is " + std::to_string(wrong) + ", allowed: 0 (by host), or a number that divides the 4 ranks");
  }
  const auto find_three_and_one = [] {
    find(
        0, 4, [](int rank) { return rank / 3; }, 2);
  };
  EXPECT_EQ(test::message_of<InvalidArgument>(find_three_and_one),
            "ranks_per_node is 2, but ranks 2 and 3 of such a node cannot map each other's memory");
}

}  // namespace
}  // namespace deep_ep
