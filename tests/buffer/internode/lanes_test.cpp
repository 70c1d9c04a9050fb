// Several lanes to each rail: chunks take them in turn, and nothing is ordered between them.
#include <cstring>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/options.hpp"
#include "csrc/rdma/connections.hpp"
#include "kernels/normal/params.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

int asked_with(const char* variable, int lanes, int num_qps_per_rank) {
  const Setting setting("DEEP_EP_INTERNODE_LANES", variable);
  InternodeOptions options;
  options.lanes = lanes;
  options.num_qps_per_rank = num_qps_per_rank;
  return asked_for_internode_lanes(options);
}

TEST(InternodeLanes, TheOptionComesBeforeTheVariableAndNumQpsPerRankBoundsBoth) {
  EXPECT_EQ(asked_with("1", 0, 0), 1);
  EXPECT_EQ(asked_with("1", 0, 24), 1);
  EXPECT_EQ(asked_with("4", 0, 0), 4);
  EXPECT_EQ(asked_with("4", 0, 24), 4);
  EXPECT_EQ(asked_with("4", 0, 3), 2);
  EXPECT_EQ(asked_with("4", 0, 1), 1);
  EXPECT_EQ(asked_with("1", 4, 0), 4);
  EXPECT_EQ(asked_with("1", 2, 2), 2);
  EXPECT_EQ(asked_with("4", 0, 1 << 30), kMostInternodeLanes);
  require_throws<InvalidArgument>([&] { asked_with("3", 0, 0); }, {"DEEP_EP_INTERNODE_LANES", "'3'", "1|2|4"},
                                  "variable");
  require_throws<InvalidArgument>([&] { asked_with("2", 3, 0); }, {"internode.lanes is 3", "1, 2, 4"}, "option");
  require_throws<InvalidArgument>([&] { asked_with("2", 0, -1); }, {"internode.num_qps_per_rank is -1", "at least 1"},
                                  "negative");
  require_throws<InvalidArgument>([&] { asked_with("2", 4, 3); },
                                  {"internode.lanes is 4", "internode.num_qps_per_rank is 3"}, "both");
}

/// A posting thread never waits for its NIC because of too small a queue pair.
TEST(InternodeLanes, QueuePairsHoldAllChunksInFlight) {
  for (const int lanes : {1, 2, 4}) {
    const std::uint32_t depth = internode_depth(lanes);
    for (std::size_t bytes = std::size_t{1} << 12; bytes < std::size_t{1} << 34; bytes *= 3) {
      const Rings rings = Rings::make(0, bytes, 3, 512, lanes);
      EXPECT_LE(1 + 2 * rings.in_lane(rings.chunks), static_cast<int>(depth)) << lanes << " lanes, " << bytes;
    }
  }
}

constexpr std::size_t kLanesHeap = std::size_t{8} << 20;
constexpr std::size_t kLanesWindow = std::size_t{64} << 10;  // two or three chunks of each lane in a ring

BufferOptions lanes_options(int lanes, int ranks_per_node) {
  BufferOptions options{.heap_bytes = kLanesHeap, .window_bytes = kLanesWindow, .ranks_per_node = ranks_per_node};
  options.internode.lanes = lanes;
  return options;
}

ClusterOptions few_warps(int ranks, std::uint64_t seed) {
  ClusterOptions options{.ranks = ranks, .where = {}, .host = {}};
  options.host = {.multiprocessors = 2, .warps_per_block = 4, .seed = seed};
  return options;
}

/// Keeps the table of queue pairs that kernels get.
class PairsExecutor final : public CountingExecutor {
 public:
  PairsExecutor(const std::shared_ptr<Executor>& inner, int ranks, int lanes)
      : CountingExecutor(inner),
        ranks_(ranks),
        table_(static_cast<std::size_t>(lanes * static_cast<int>(InternodeChannel::count) * ranks)) {}

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    if (bytes == table_.size() * sizeof(RdmaPeerParams)) std::memcpy(table_.data(), source, bytes);
    CountingExecutor::copy(destination, source, bytes, stream);
  }
  const RdmaQueuePair& pair(InternodeChannel channel, int lane, int peer) const {
    const int at = lane * static_cast<int>(InternodeChannel::count) + static_cast<int>(channel);
    return table_.at(static_cast<std::size_t>(at * ranks_ + peer)).queue;
  }
  /// On the CPU, when all kernels have ended.
  int writes(int lane, int peer) const {
    const RdmaQueuePair& queue = pair(InternodeChannel::rows, lane, peer);
    require(queue.peer == peer && queue.state->posted < queue.depth, "the table of queue pairs");
    int writes = 0;
    for (std::uint64_t i = 0; i < queue.state->posted; ++i) {
      writes += (device::rdma::swap32(queue.ring[i].segment[0].word[0]) & 0xff) == device::rdma::kOpcodeWrite;
    }
    return writes;
  }

 private:
  int ranks_;
  std::vector<RdmaPeerParams> table_;
};

TEST(InternodeLanes, ChunksTakeThemInTurn) {
  constexpr int kTokens = 16 * 6 + 3;  // 7 chunks, all for both nodes
  const Case one = make_case({.tokens = {kTokens, kTokens}, .local_experts = 1, .topk = 2, .ranks_per_node = 1});
  for (const int lanes : {1, 2, 4}) {
    SCOPED_TRACE(lanes);
    run_cluster(few_warps(2, 0), [&](Rank& rank) {
      const auto executor = std::make_shared<PairsExecutor>(rank.executor(), 2, lanes);
      BufferOptions options = lanes_options(lanes, 1);
      options.window_bytes = 0;
      options.internode.num_qps_per_rank = 5;
      Buffer buffer(rank.bootstrap(), executor, options);
      const std::string channels = "1 peer x " + std::to_string(2 * lanes) + " channels";
      require(buffer.describe().find(channels) != std::string::npos, buffer.describe());
      const Inputs inputs = upload_inputs(rank, one);
      const DispatchResult first = buffer.dispatch(inputs.dispatch, rank.call());
      executor->synchronize(rank.stream());
      const int peer = 1 - rank.rank();
      for (int lane = 0; lane < lanes; ++lane) {
        const int chunks = (7 - lane + lanes - 1) / lanes;
        const int counts = lane == 0 ? 2 : 0;  // writes of notify
        require(executor->writes(lane, peer) == chunks + counts,
                "lane " + std::to_string(lane) + " has " + std::to_string(executor->writes(lane, peer)) + " writes");
        require(executor->pair(InternodeChannel::rows, lane, peer).depth == internode_depth(lanes), "depth");
      }
      buffer.destroy();
    });
  }
}

struct InternodeLanesOver {
  const char* name;
  const char* wire;
  int lanes;
};
class InternodeLanesTest : public testing::TestWithParam<InternodeLanesOver> {
 private:
  Setting wire_{"DEEP_EP_RDMA_WIRE", GetParam().wire};
};

Shape lanes_shape(int nodes, int width, std::uint64_t seed) {
  Shape shape{.tokens = equal_tokens(nodes * width, under_thread_sanitizer() ? 20 : 50),
              .local_experts = 2,
              .ranks_per_node = width,
              .seed = seed};
  shape.tokens[seed % shape.tokens.size()] = 0;
  shape.tokens[(seed + 1) % shape.tokens.size()] = under_thread_sanitizer() ? 100 : 170;
  return shape;
}

/// Rows of several sizes one after the other, so that each call's chunks lie across those of the call before.
void run_lanes(const ClusterOptions& cluster, int lanes, int nodes, int width, std::uint64_t seed) {
  const Case plain = make_case(lanes_shape(nodes, width, seed));
  Shape eight_bits = lanes_shape(nodes, width, seed);  // the same routing, other rows
  eight_bits.dtype = DType::float8_e4m3;
  eight_bits.hidden = 512;
  eight_bits.scales = 4;
  const Case other = make_case(eight_bits);
  Shape large = lanes_shape(nodes, width, seed + 1);
  large.hidden = 1024;  // fewer chunks than lanes need
  const Case wide = make_case(large);
  run_cluster(cluster, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(lanes_options(lanes, width));
    const std::int64_t worst = seed % 2 == 0 ? 0 : plain.shape.max_tokens() * rank.size();
    Inputs inputs = upload_inputs(rank, plain);
    inputs.dispatch.num_worst_tokens = worst;
    const DispatchResult first = buffer.dispatch(inputs.dispatch, rank.call());
    const DispatchResult second = buffer.dispatch(upload_inputs(rank, wide).dispatch, rank.call());
    check_dispatch(rank, wide, second, {.cached = false, .num_worst_tokens = 0});
    const Returned of_second = upload_returned(rank, buffer, wide, second.handle, true);
    const Inputs later = upload_inputs(rank, other);
    DispatchArguments again;
    again.x = later.dispatch.x;
    again.x_scales = later.dispatch.x_scales;
    again.handle = &first.handle;
    // A rank has few tokens and gets many rows, or the other way round: here the one that sends much sends again at
    // once.
    DispatchResult cached;
    for (int i = 0; i < 4; ++i) {
      const CombineResult combined = buffer.combine(of_second.combine, rank.call());
      cached = buffer.dispatch(again, rank.call());
      check_combine(rank, wide, combined);
    }
    const Returned returned = upload_returned(rank, buffer, plain, first.handle, true);
    for (int i = 0; i < 2; ++i) check_combine(rank, plain, buffer.combine(returned.combine, rank.call()));
    check_dispatch(rank, other, cached, {.cached = true, .num_worst_tokens = worst});
    check_dispatch(rank, plain, first, {.cached = false, .num_worst_tokens = worst});
    if (under_thread_sanitizer()) return;  // near_window_test.cpp has it with one lane
    const std::vector<Tensor> hoard = rank.rank() % 2 == 0 ? take_whole_heap(rank, buffer) : std::vector<Tensor>{};
    RoundOptions near;
    near.returned_in_heap = false;
    run_round(rank, buffer, plain, near);
    buffer.check();
  });
}

TEST_P(InternodeLanesTest, EverySeedGivesTheSame) {
  if (under_sanitizer() && GetParam().name != std::string("local_4")) GTEST_SKIP() << "one of them sees as much";
  const std::pair<int, int> grids[] = {{2, 2}, {3, 1}, {2, 1}};
  const bool slow = under_sanitizer() || GetParam().wire != std::string("local");
  under_schedules({.usually = slow ? 1 : 12}, [&](std::uint64_t seed) {
    const auto [nodes, width] = grids[(seed - 1) % std::size(grids)];
    run_lanes(few_warps(nodes * width, seed), GetParam().lanes, nodes, width, seed);
  });
}

constexpr const char* kLanesDisorder = "simulated:reorder=30,completion=30";
INSTANTIATE_TEST_SUITE_P(On, InternodeLanesTest,
                         testing::Values(InternodeLanesOver{"local_1", "local", 1},
                                         InternodeLanesOver{"local_2", "local", 2},
                                         InternodeLanesOver{"local_4", "local", 4},
                                         InternodeLanesOver{"simulated_2", kLanesDisorder, 2},
                                         InternodeLanesOver{"simulated_4", kLanesDisorder, 4}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace deep_ep::test
