// Several connections to each rank that is reached by RDMA: how many, what goes by which, and that nothing relies on an
// order among them.
#include <string>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/options.hpp"
#include "kernels/low_latency/params.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/cluster/queue_pairs_executor.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

TEST(LowLatencyLaneChoice, TheProgramThenTheVariable) {
  const auto with = [](const char* value, int asked) {
    const Setting setting("DEEP_EP_LOW_LATENCY_LANES", value);
    return with_environment({.low_latency = {.bytes = 1, .lanes = asked}}, 1).low_latency.lanes;
  };
  EXPECT_EQ(with("auto", 0), 0);
  EXPECT_EQ(with("1", 0), 1);
  EXPECT_EQ(with("4", 0), 4);
  EXPECT_EQ(with("4", 2), 2);
  EXPECT_EQ(with("3", 1), 1) << "not looked at";
  require_throws<InvalidArgument>([&] { with("3", 0); }, {"DEEP_EP_LOW_LATENCY_LANES", "'3'", "auto|1|2|4"},
                                  "variable");
  require_throws<InvalidArgument>([&] { with("auto", 3); }, {"low_latency.lanes is 3", "1, 2, 4"}, "option");
}

TEST(LowLatencyLaneChoice, MoreWhereFewFlowsShareSeveralPaths) {
  const auto lanes = [](int far, bool keeps_to_path) {
    BufferOptions options;
    options.low_latency.bytes = Buffer::low_latency_bytes_hint(1, 128, far + 1, far + 1);
    const std::vector<int> domains(static_cast<std::size_t>(far) + 1);
    BufferPlan plan = BufferPlan::make(options, NodeMembership::of_domains(0, domains, 1));
    rdma::AgreedWire wire;
    wire.kind = rdma::WireKind::verbs;
    wire.ranks.resize(static_cast<std::size_t>(far) + 1);
    wire.ranks.front().keeps_to_path = keeps_to_path;
    plan.choose_lanes(wire);
    return plan.options.low_latency.lanes;
  };
  for (const int far : {0, 1, 8, 100}) EXPECT_EQ(lanes(far, false), 1);
  EXPECT_EQ(lanes(0, true), 1) << "nobody is reached";
  EXPECT_EQ(lanes(1, true), 4);
  EXPECT_EQ(lanes(8, true), 4);
  EXPECT_EQ(lanes(16, true), 2);
  EXPECT_EQ(lanes(31, true), 2);
  EXPECT_EQ(lanes(32, true), 1);
}

BufferOptions lane_options(int ranks, int max_tokens, int lanes) {
  BufferOptions options = low_latency_options(ranks, max_tokens, 256);
  options.low_latency.allow_nvlink = false;
  options.low_latency.lanes = lanes;
  return options;
}

/// The writes of a call are its rows and what precedes them, whatever the lanes; an addition speaks for a row at least.
TEST(LowLatencyLanes, RowsTakeThemInTurn) {
  constexpr int kRanks = 2;
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {13, 9}, .max_tokens = 13, .hidden = 256, .local_experts = 2, .topk = 2, .seed = 5});
  int rows[kRanks] = {};  // that one lane takes in dispatch
  for (const int lanes : {1, 2, 4}) {
    SCOPED_TRACE(lanes);
    ASSERT_NO_THROW(run_cluster({.ranks = kRanks}, [&](Rank& rank) {
      const auto executor = std::make_shared<QueuePairsExecutor>(rank.executor(), kRanks, low_latency_channels(lanes));
      Buffer buffer(rank.bootstrap(), executor, lane_options(kRanks, 13, lanes));
      const std::string channels = std::to_string(low_latency_channels(lanes)) + " channels";
      require(buffer.describe().find(channels) != std::string::npos, buffer.describe());
      dispatch_and_combine(rank, buffer, one, one.expected());
      rank.executor()->synchronize(rank.stream());
      const int peer = 1 - rank.rank();
      int& of_one = rows[rank.rank()];
      const auto posted = [&](LowLatencyKind kind, int lane, std::uint32_t opcode) {
        return executor->posted(channel_of(kind, lane), peer, opcode);
      };
      if (lanes == 1) of_one = posted(LowLatencyKind::dispatch, 0, device::rdma::kOpcodeWrite) - 1;
      require(of_one > 4, "every lane has rows");
      for (const LowLatencyKind kind : {LowLatencyKind::dispatch, LowLatencyKind::combine}) {
        for (int lane = 0; lane < lanes; ++lane) {
          const int first = lane == 0 ? 1 : 0;  // counts or selections
          const int mine = posted(kind, lane, device::rdma::kOpcodeWrite) - first;
          const int additions = posted(kind, lane, device::rdma::kOpcodeFetchAdd);
          if (kind == LowLatencyKind::dispatch) {
            require(mine == (of_one - lane + lanes - 1) / lanes, "row i goes by lane i modulo the lanes");
          }
          // Combine tells of the selections before there are rows.
          require(additions >= (mine != 0 ? 1 : 0) && additions <= mine + first, "a budget of additions");
        }
      }
      rank.bootstrap()->barrier();
    }));
  }
}

constexpr const char* kDisorder = "simulated:reorder=30,completion=30";
struct LanesOver {
  const char* wire;
  Topology topology;
  std::uint64_t seed;
};
class LowLatencyLanesOver : public testing::TestWithParam<LanesOver> {};

/// Nothing completes or arrives in the order of posting across lanes: by schedules, and by a NIC that delays pieces of
/// payload and completions by different times.
TEST_P(LowLatencyLanesOver, ManySchedules) {
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {9, 0, 14, 5}, .max_tokens = 14, .hidden = 256, .local_experts = 2, .topk = 3});
  const LanesOver& over = GetParam();
  if (under_thread_sanitizer() && over.wire == std::string(kDisorder) && over.topology == Topology::rails) {
    GTEST_SKIP() << "the others see as much";
  }
  std::uint64_t seed = over.seed;
  for (const int lanes : {2, 4}) {
    if (under_sanitizer() && lanes == 4) continue;
    SCOPED_TRACE(std::string(over.wire) + ", lanes " + std::to_string(lanes));
    const Setting wire("DEEP_EP_RDMA_WIRE", over.wire);
    const Combined expected = one.expected(ranks_per_node_of(over.topology, 4));
    ClusterOptions options{.ranks = 4};
    options.where.topology = over.topology;
    options.host = {.multiprocessors = 2, .warps_per_block = 4, .seed = ++seed};
    ASSERT_NO_THROW(run_cluster(options, [&](Rank& rank) {
      BufferOptions buffer_options = low_latency_options(4, 14, 256);
      buffer_options.low_latency.lanes = lanes;
      Buffer& buffer = rank.buffer(buffer_options);
      for (int call = 0; call < (under_sanitizer() ? 1 : 2); ++call) {
        dispatch_and_combine(rank, buffer, one, expected);
      }
      buffer.low_latency_clean(rank.call().stream);
      buffer.check();
      buffer.destroy();
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(On, LowLatencyLanesOver,
                         testing::Values(LanesOver{"local", Topology::only_rdma, 0},
                                         LanesOver{"local", Topology::rails, 10},
                                         LanesOver{kDisorder, Topology::only_rdma, 20},
                                         LanesOver{kDisorder, Topology::rails, 30}),
                         [](const auto& info) {
                           return std::string(info.param.wire).substr(0, info.param.wire[0] == 'l' ? 5 : 9) +
                                  (info.param.topology == Topology::rails ? "_rails" : "_only_rdma");
                         });

}  // namespace
}  // namespace deep_ep::test
