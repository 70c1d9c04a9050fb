// Which ends of queue pairs can talk, and how packets get from one to the other.
#include "csrc/rdma/queue_pair_address.hpp"

#include <gtest/gtest.h>

#include "deep_ep/error.hpp"

namespace deep_ep::test {
namespace {

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
