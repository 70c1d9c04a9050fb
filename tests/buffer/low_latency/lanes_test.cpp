// Several connections to each rank that is reached by RDMA: how many, what goes by which, and that nothing relies on an
// order among them.
#include <cstring>
#include <string>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/options.hpp"
#include "kernels/low_latency/params.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
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
  const auto lanes = [](int far, bool keeps_to_path) { return lanes_for(far, keeps_to_path); };
  for (const int far : {0, 1, 8, 100}) EXPECT_EQ(lanes(far, false), 1);
  EXPECT_EQ(lanes(0, true), 1) << "nobody is reached";
  EXPECT_EQ(lanes(1, true), 4);
  EXPECT_EQ(lanes(8, true), 4);
  EXPECT_EQ(lanes(16, true), 2);
  EXPECT_EQ(lanes(31, true), 2);
  EXPECT_EQ(lanes(32, true), 1);
}

/// What was posted to one queue pair.
struct LanePosts {
  int writes = 0;
  int additions = 0;
  int doorbells = 0;
};

/// Keeps the table of queue pairs that kernels get.
class LaneExecutor final : public CountingExecutor {
 public:
  LaneExecutor(const std::shared_ptr<Executor>& inner, int ranks, int lanes)
      : CountingExecutor(inner), ranks_(ranks), table_(static_cast<std::size_t>(low_latency_channels(lanes) * ranks)) {}

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    if (!noted_ && bytes == table_.size() * sizeof(RdmaPeerParams)) {
      std::memcpy(table_.data(), source, bytes);
      noted_ = true;
    }
    CountingExecutor::copy(destination, source, bytes, stream);
  }

  /// On the CPU, when all kernels have ended.
  LanePosts posts(LowLatencyKind kind, int lane, int peer) const {
    LanePosts posts;
    const RdmaQueuePair& pair = table_.at(static_cast<std::size_t>(channel_of(kind, lane) * ranks_ + peer)).queue;
    require(pair.peer == peer && pair.state->posted < pair.depth, "the table of queue pairs");
    for (std::uint64_t i = 0; i < pair.state->posted; ++i) {
      const std::uint32_t opcode = device::rdma::swap32(pair.ring[i].segment[0].word[0]) & 0xff;
      posts.writes += opcode == device::rdma::kOpcodeWrite;
      posts.additions += opcode == device::rdma::kOpcodeFetchAdd;
      const std::uint32_t flags = pair.ring[i].segment[0].word[2] >> 24;
      posts.doorbells += (flags & device::rdma::kFlagSignalled) != 0;  // the last entry of each
    }
    return posts;
  }

 private:
  int ranks_;
  std::vector<RdmaPeerParams> table_;
  bool noted_ = false;
};

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
    ASSERT_NO_THROW(run_cluster({.ranks = kRanks, .where = {}, .host = {}}, [&](Rank& rank) {
      const auto executor = std::make_shared<LaneExecutor>(rank.executor(), kRanks, lanes);
      Buffer buffer(rank.bootstrap(), executor, lane_options(kRanks, 13, lanes));
      const std::string channels = std::to_string(low_latency_channels(lanes)) + " channels";
      require(buffer.describe().find(channels) != std::string::npos, buffer.describe());
      dispatch_and_combine(rank, buffer, one, one.expected());
      rank.executor()->synchronize(rank.stream());
      const int peer = 1 - rank.rank();
      int& of_one = rows[rank.rank()];
      if (lanes == 1) of_one = executor->posts(LowLatencyKind::dispatch, 0, peer).writes - 1;
      require(of_one > 4, "every lane has rows");
      for (const LowLatencyKind kind : {LowLatencyKind::dispatch, LowLatencyKind::combine}) {
        for (int lane = 0; lane < lanes; ++lane) {
          const LanePosts posts = executor->posts(kind, lane, peer);
          const int first = lane == 0 ? 1 : 0;  // counts or selections
          const int mine = posts.writes - first;
          if (kind == LowLatencyKind::dispatch) {
            require(mine == (of_one - lane + lanes - 1) / lanes, "row i goes by lane i modulo the lanes");
          }
          // Combine tells of the selections before there are rows.
          require(posts.additions >= (mine != 0 ? 1 : 0) && posts.additions <= mine + first, "a budget of additions");
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
  const RailCase rail_case =
      make_rail_case({.tokens = {9, 0, 14, 5}, .max_tokens = 14, .hidden = 256, .local_experts = 2, .topk = 3}, {4, 2});
  const LowLatencyCombineCase& one = rail_case.calls;
  const LanesOver& over = GetParam();
  if (under_thread_sanitizer() && over.wire == std::string(kDisorder) && over.topology == Topology::rails) {
    GTEST_SKIP() << "the others see as much";
  }
  std::uint64_t seed = over.seed;
  for (const int lanes : {2, 4}) {
    if (under_sanitizer() && lanes == 4) continue;
    SCOPED_TRACE(std::string(over.wire) + ", lanes " + std::to_string(lanes));
    const Setting wire("DEEP_EP_RDMA_WIRE", over.wire);
    const Combined& expected = over.topology == Topology::rails ? rail_case.by_rails : rail_case.direct;
    ClusterOptions options{.ranks = 4, .where = {}, .host = {}};
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
