// Which end of a queue pair is told of which.
#include "csrc/rdma/queue_pair_address.hpp"

#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"

namespace deep_ep::test {
namespace {

/// A number that no other end has.
std::uint32_t number(int rank, int channel, int peer) {
  return static_cast<std::uint32_t>(100 * rank + 10 * channel + peer);
}

TEST(QueuePairAddressTest, EveryEndLearnsOfTheOneAtItsOtherSide) {
  // Rank 1 is reached by all, ranks 0 and 2 do not reach each other, rank 3 reaches nobody.
  const std::vector<std::vector<int>> peers = {{1}, {2, 0}, {1}, {}};
  constexpr int kChannels = 3;
  expect_ranks_succeed(4, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const std::vector<int>& mine = peers[static_cast<std::size_t>(rank)];
    std::vector<rdma::QueuePairAddress> addresses;
    for (int channel = 0; channel < kChannels; ++channel) {
      for (const int peer : mine) addresses.push_back({.queue_pair = number(rank, channel, peer)});
    }
    const auto theirs = rdma::exchange_addresses(*bootstrap, kChannels, mine, addresses);
    std::size_t end = 0;
    for (int channel = 0; channel < kChannels; ++channel) {
      for (const int peer : mine) {
        if (theirs.at(end++).queue_pair != number(peer, channel, rank)) throw std::runtime_error("another end");
      }
    }
    if (end != theirs.size()) throw std::runtime_error("more ends than were asked about");
  });
}

rdma::QueuePairAddress infiniband(rdma::GidBytes gid) {
  return {.lid = 7, .mtu = 5, .link_layer = rdma::LinkLayer::infiniband, .gid = gid};
}

TEST(QueuePairAddressTest, InfiniBandHasAGlobalRouteBetweenSubnetsAndWhereAPortAsks) {
  const rdma::GidBytes here{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  rdma::GidBytes there = here;
  there[15] = 2;
  EXPECT_FALSE(rdma::has_global_route(infiniband(here), infiniband(there)));
  EXPECT_FALSE(rdma::has_global_route(infiniband({}), infiniband(there))) << "no GID, so no other subnet is known";
  rdma::QueuePairAddress asks = infiniband(there);
  asks.needs_global_route = 1;
  EXPECT_TRUE(rdma::has_global_route(infiniband(here), asks));
  EXPECT_TRUE(rdma::has_global_route(asks, infiniband(here)));
  EXPECT_THROW(rdma::check_compatible("mlx5_0", infiniband({}), asks), RankMismatch);
  there[7] = 1;
  EXPECT_TRUE(rdma::has_global_route(infiniband(here), infiniband(there)));
  EXPECT_EQ(rdma::destination_lid(infiniband(here), infiniband(there)), 7);
}

TEST(QueuePairAddressTest, AFloatingLidLeadsToAnotherSubnet) {
  const rdma::GidBytes here{0xfe, 0xc0, 0, 0, 0x12, 0x34, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1};
  rdma::GidBytes there{0xfe, 0xc0, 0, 0, 0x56, 0x78, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2};
  EXPECT_FALSE(rdma::has_global_route(infiniband(here), infiniband(there))) << "only the floating LIDs differ";
  EXPECT_EQ(rdma::destination_lid(infiniband(here), infiniband(there)), 7);
  there[7] = 2;
  EXPECT_TRUE(rdma::has_global_route(infiniband(here), infiniband(there)));
  EXPECT_EQ(rdma::destination_lid(infiniband(here), infiniband(there)), 0x5678);
}

}  // namespace
}  // namespace deep_ep::test
