// Queue pairs of the handler `gpu` as buffers of many sizes make them: where each lies in the registered memory, and by
// which of a NIC's bonded ports it sends. With a device that refuses what firmware refuses.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/normal/params.hpp"
#include "tests/rdma/verbs/nic_fixture.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Ranks of nodes of one rank each.
ConnectionOptions low_latency_of(int nodes, int lanes) {
  BufferPlan plan{.options = {.low_latency = {.lanes = lanes}}, .grid = {.num_ranks = 1}};
  plan.reach.far.resize(static_cast<std::size_t>(nodes - 1));
  std::iota(plan.reach.far.begin(), plan.reach.far.end(), 1);
  return plan.connections()[BufferPlan::kLowLatency];
}
ConnectionOptions internode_of(int nodes, int lanes) {
  const BufferPlan plan{.options = {.internode = {.lanes = lanes}}, .grid = {.num_ranks = nodes, .width = 1}};
  return plan.connections()[BufferPlan::kNormalMode];
}

class ManyNodesTest : public test::NicFixture {
 protected:
  /// Makes and connects all; returns the physical port that each queue pair was given, by channel and peer.
  std::vector<int> ports(const ConnectionOptions& options) {
    ends_.reset();
    fake_.commands.clear();
    make(options);
    std::vector<int> ports;
    for (const auto& command : commands(0x502)) ports.push_back(static_cast<int>(command.get(0xc0 + 0x04, 4)));
    return ports;
  }
  /// The ports of these channels to the peer at this place.
  static std::set<int> ports_of(const std::vector<int>& ports, const std::vector<int>& channels, std::size_t peers,
                                std::size_t place = 0) {
    std::set<int> found;
    for (const int channel : channels) found.insert(ports.at(static_cast<std::size_t>(channel) * peers + place));
    return found;
  }
};

TEST_F(ManyNodesTest, EveryQueueHasAPlaceThatTheFirmwareCanName) {
  for (const std::size_t page_bytes : {std::size_t{4096}, std::size_t{65536}}) {
    nic_.gpu->page_bytes = page_bytes;
    for (int nodes = 2; nodes <= 16; ++nodes) {
      for (const int lanes : {1, 2, 4}) {
        SCOPED_TRACE(fmt::format("{} nodes, {} lanes, pages of {} bytes", nodes, lanes, page_bytes));
        const auto peers = static_cast<std::size_t>(nodes - 1);
        ASSERT_NO_THROW(
            EXPECT_EQ(ports(internode_of(nodes, lanes)).size(), peers * static_cast<std::size_t>(lanes + 1)));
        ASSERT_NO_THROW(EXPECT_EQ(ports(low_latency_of(nodes, lanes)).size(),
                                  peers * static_cast<std::size_t>(low_latency_channels(lanes))));
      }
    }
  }
}

TEST_F(ManyNodesTest, LanesToOnePeerLeaveByAllBondedPorts) {
  fake_.lag_state = 1;
  for (const int lanes : {2, 4}) {
    std::vector<int> rows, dispatch, combine;
    for (int lane = 0; lane < lanes; ++lane) {
      rows.push_back(lane);
      dispatch.push_back(channel_of(LowLatencyKind::dispatch, lane));
      combine.push_back(channel_of(LowLatencyKind::combine, lane));
    }
    const std::set<int> both{1, 2};
    EXPECT_EQ(ports_of(ports(internode_of(2, lanes)), rows, 1), both) << lanes << " lanes";
    const std::vector<int> calls = ports(low_latency_of(2, lanes));
    EXPECT_EQ(ports_of(calls, dispatch, 1), both) << lanes << " lanes";
    EXPECT_EQ(ports_of(calls, combine, 1), both) << lanes << " lanes";
  }
}

TEST_F(ManyNodesTest, PeersShareBondedPortsAndSoDoKindsOfCalls) {
  fake_.lag_state = 1;
  const std::vector<int> rails = ports(internode_of(3, 1));
  EXPECT_NE(ports_of(rails, {0}, 2, 0), ports_of(rails, {0}, 2, 1)) << "rows to one peer, rows to the other";
  const std::vector<int> calls = ports(low_latency_of(2, 1));
  EXPECT_NE(ports_of(calls, {channel_of(LowLatencyKind::dispatch, 0)}, 1),
            ports_of(calls, {channel_of(LowLatencyKind::combine, 0)}, 1));
  fake_.lag_state = 0;
  EXPECT_EQ(ports_of(ports(internode_of(2, 4)), {0, 1, 2, 3}, 1), std::set<int>{0}) << "not bonded";
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
