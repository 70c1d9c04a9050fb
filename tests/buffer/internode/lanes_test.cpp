// Several lanes to each rail: a chunk takes one that has few bytes under way, and nothing is ordered between them.
#include <algorithm>
#include <array>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/options.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/queue_pairs_executor.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

int asked_with(const char* variable, int lanes, int num_qps_per_rank = 0) {
  const Setting setting("DEEP_EP_INTERNODE_LANES", variable);
  return with_environment({.internode = {.lanes = lanes, .num_qps_per_rank = num_qps_per_rank}}, 1).internode.lanes;
}

TEST(InternodeLanes, TheOptionComesBeforeTheVariable) {
  EXPECT_EQ(asked_with("auto", 0), 0);
  EXPECT_EQ(asked_with("1", 0), 1);
  EXPECT_EQ(asked_with("4", 0), 4);
  EXPECT_EQ(asked_with("1", 4), 4);
  require_throws<InvalidArgument>([&] { asked_with("3", 0); }, {"DEEP_EP_INTERNODE_LANES", "'3'", "auto|1|2|4"},
                                  "variable");
  require_throws<InvalidArgument>([&] { asked_with("2", 3); }, {"internode.lanes is 3", "1, 2, 4"}, "option");
  require_throws<InvalidArgument>([&] { asked_with("2", 0, -1); }, {"internode.num_qps_per_rank is -1, allowed: 0"},
                                  "negative");
}

constexpr std::size_t kLanesHeap = std::size_t{8} << 20;
constexpr std::size_t kLanesWindow = std::size_t{64} << 10;  // a ring has few chunks

BufferOptions lanes_options(int lanes, int ranks_per_node) {
  BufferOptions options{.heap_bytes = kLanesHeap, .window_bytes = kLanesWindow, .ranks_per_node = ranks_per_node};
  options.internode.lanes = lanes;
  return options;
}

ClusterOptions few_warps(int ranks, std::uint64_t seed) {
  ClusterOptions options{.ranks = ranks, .host = {.multiprocessors = 2, .warps_per_block = 4, .seed = seed}};
  return options;
}

/// One path of the network is much slower than the others: the call does not wait for its share of the rows there. On
/// a busy machine the other paths are slow as well, so there are several attempts.
TEST(InternodeLanes, ASlowPathTakesFewChunks) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "the other paths are as slow there";
  const Setting wire("DEEP_EP_RDMA_WIRE", "simulated:slow=1,slow_rate=0.001");  // 0.13 s for a chunk
  constexpr int kLanes = 4, kChunks = 64, kFew = 10;
  const Case one = make_case(
      {.tokens = equal_tokens(2, 16 * kChunks), .local_experts = 1, .topk = 2, .hidden = 4096, .ranks_per_node = 1});
  BufferOptions options = lanes_options(kLanes, 1);
  options.heap_bytes = std::size_t{64} << 20;
  options.window_bytes = std::size_t{40} << 20;
  options.internode.num_qps_per_rank = 5;
  int most = kChunks / kLanes;
  for (int attempt = 0; attempt < 5 && most >= kFew; ++attempt) {
    std::array<int, 2> slow{};
    run_cluster(few_warps(2, 0), [&](Rank& rank) {
      const auto executor = std::make_shared<QueuePairsExecutor>(rank.executor(), 2, kLanes + 1);
      Buffer buffer(rank.bootstrap(), executor, options);
      const DispatchResult result = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
      executor->synchronize(rank.stream());
      check_dispatch(rank, one, result);
      const int shapes = 1;  // they are written over the first lane, too
      slow.at(std::size_t(rank.rank())) = executor->posted(0, 1 - rank.rank(), device::rdma::kOpcodeWrite) - shapes;
      buffer.destroy();
    });
    most = std::max(slow[0], slow[1]);
  }
  EXPECT_LT(most, kFew) << "chunks by the slow path, whose share is " << kChunks / kLanes;
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
    const DispatchArguments again = cached_dispatch(later, first.handle);
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
