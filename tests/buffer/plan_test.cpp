// What a plan says before anything is allocated, and what a buffer then takes.
#include "csrc/buffer/buffer_plan.hpp"

#include <regex>

#include "tests/cluster/fixture.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep::test {
namespace {

/// As a buffer's description tells them: "2 peers x 2 channels".
std::size_t described_queue_pairs(const std::string& text) {
  static const std::regex kPairs("([0-9]+) peers? x ([0-9]+) channels");
  std::size_t pairs = 0;
  for (std::sregex_iterator found(text.begin(), text.end(), kPairs), end; found != end; ++found) {
    pairs += std::stoul((*found)[1]) * std::stoul((*found)[2]);
  }
  return pairs;
}

class BufferPlanTest : public ClusterTest {};
DEEP_EP_ON_THREADS(BufferPlanTest);

TEST_P(BufferPlanTest, IsWhatABufferTakes) {
  run_cluster(cluster(4), [](Rank& rank) {
    std::size_t least = 0;
    for (const int ranks_per_node : {4, 2, 1}) {
      const Buffer& buffer = rank.buffer({.heap_bytes = 16 * kMiB,
                                          .ranks_per_node = ranks_per_node,
                                          .low_latency = {.bytes = 8 * kMiB, .rails = LowLatencyRails::always}});
      const BufferPlan plan = BufferPlan::make(
          buffer.options(), NodeMembership::of_domains(
                                rank.rank(), std::vector(static_cast<std::size_t>(rank.size()), 0), ranks_per_node));
      const std::size_t planned = plan.layout.bytes() - plan.layout.window_at();
      constexpr std::size_t kPage = 2 * kMiB;  // of GPUs
      require(buffer.local_memory().bytes() >= planned && buffer.local_memory().bytes() < planned + kPage,
              "the heap is as large as planned: " + buffer.describe());
      std::size_t queue_pairs = 0;
      for (const rdma::ConnectionOptions& options : plan.connections()) queue_pairs += options.ends();
      require(described_queue_pairs(buffer.describe()) == queue_pairs, "queue pairs: " + buffer.describe());
      require(queue_pairs >= least, "smaller nodes need more queue pairs");
      least = queue_pairs + 1;
    }
  });
}

BufferPlan plan_of(int nodes) {
  constexpr int kWidth = 8;
  BufferOptions options;
  options.heap_bytes = std::size_t{1} << 30;
  options.low_latency.bytes = Buffer::low_latency_bytes_hint(16, 7168, nodes * kWidth, nodes * kWidth);
  return BufferPlan::make(
      options, NodeMembership::of_domains(3, std::vector(static_cast<std::size_t>(nodes * kWidth), 0), kWidth));
}

TEST(BufferPlan, OldValuesOfAdditionsHaveALineOfTheirOwn) {
  const BufferPlan plan = plan_of(2);
  for (const rdma::ConnectionOptions& set : plan.connections()) {
    EXPECT_GE(set.sink, plan.layout.control.bytes);
    EXPECT_LE(set.sink + kLine, plan.layout.low_latency.begin);
  }
}

TEST(BufferPlan, LanesThatAreLeftOpenFollowFromTheNics) {
  const auto lanes = [](rdma::WireKind kind, int on_ethernet) {
    BufferPlan plan = plan_of(4);
    rdma::AgreedWire wire;
    wire.kind = kind;
    wire.ranks.resize(32);
    for (int rank = 0; rank < on_ethernet; ++rank) wire.ranks.at(static_cast<std::size_t>(rank)).keeps_to_path = true;
    plan.choose_lanes(wire);
    return std::pair(plan.options.internode.lanes, plan.options.low_latency.lanes);
  };
  EXPECT_EQ(lanes(rdma::WireKind::verbs, 0), std::pair(1, 1));
  EXPECT_EQ(lanes(rdma::WireKind::verbs, 1), std::pair(4, 2)) << "24 remote ranks";
  EXPECT_EQ(lanes(rdma::WireKind::local, 32), std::pair(1, 1));
}

TEST(BufferPlan, LanesAreBoundedByNumQpsPerRank) {
  const auto lanes = [](int asked, int num_qps_per_rank, bool on_ethernet = false) {
    BufferPlan plan = plan_of(4);
    plan.options.internode.lanes = asked;
    plan.options.internode.num_qps_per_rank = num_qps_per_rank;
    rdma::AgreedWire wire;
    wire.kind = rdma::WireKind::verbs;
    wire.ranks.resize(32);
    wire.ranks.front().keeps_to_path = on_ethernet;
    plan.choose_lanes(wire);
    return plan.options.internode.lanes;
  };
  EXPECT_EQ(lanes(1, 0), 1);
  EXPECT_EQ(lanes(1, 24), 1);
  EXPECT_EQ(lanes(4, 0), 4);
  EXPECT_EQ(lanes(4, 24), 4);
  EXPECT_EQ(lanes(4, 3), 2);
  EXPECT_EQ(lanes(4, 1), 1);
  EXPECT_EQ(lanes(0, 3, true), 2);
  EXPECT_EQ(lanes(0, INT32_MAX, true), kMostInternodeLanes);
}

}  // namespace
}  // namespace deep_ep::test
