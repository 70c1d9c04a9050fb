// Which ends of queue pairs can talk, and how packets get from one to the other.
#include "csrc/rdma/queue_pair_address.hpp"

#include <gtest/gtest.h>

#include "deep_ep/error.hpp"

namespace deep_ep::test {
namespace {

rdma::QueuePairAddress infiniband(rdma::GidBytes gid) {
  return {.lid = 7, .mtu = 5, .link_layer = rdma::LinkLayer::infiniband, .gid = gid};
}

TEST(QueuePairAddressTest, InfiniBandHasAGlobalRouteWhereAPortAsks) {
  const rdma::GidBytes here{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  rdma::GidBytes there = here;
  there[15] = 2;
  EXPECT_FALSE(rdma::has_global_route(infiniband(here), infiniband(there)));
  rdma::QueuePairAddress asks = infiniband(there);
  asks.needs_global_route = 1;
  EXPECT_TRUE(rdma::has_global_route(infiniband(here), asks));
  EXPECT_TRUE(rdma::has_global_route(asks, infiniband(here)));
  EXPECT_THROW(rdma::check_compatible("mlx5_0", infiniband({}), asks), RankMismatch);
}

}  // namespace
}  // namespace deep_ep::test
