// Normal mode within and between nodes: layout, dispatch and combine against the oracle.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

constexpr std::size_t kRoundHeap = std::size_t{16} << 20;

/// Nodes times ranks of a node.
struct NodesAndWidth {
  int nodes, width;
  int ranks() const { return nodes * width; }
};

class InternodeRoundTest : public ClusterTest {
 protected:
  /// Few blocks and warps: many ranks share the CPUs.
  ClusterOptions cluster_of(const NodesAndWidth& grid, std::uint64_t seed = 0) const {
    ClusterOptions options = cluster(grid.ranks());
    options.host = {.multiprocessors = 2, .warps_per_block = 3, .seed = seed};
    return options;
  }
  static BufferOptions buffer_of(const NodesAndWidth& grid, std::size_t window_bytes = 0) {
    return {.heap_bytes = kRoundHeap, .window_bytes = window_bytes, .ranks_per_node = grid.width};
  }
  static Shape shape_of(const NodesAndWidth& grid, std::int64_t tokens, std::uint64_t seed) {
    return {.tokens = equal_tokens(grid.ranks(), tokens), .ranks_per_node = grid.width, .seed = seed};
  }
  std::uint64_t seed_ = test_seed();
};
DEEP_EP_ON_THREADS(InternodeRoundTest);

TEST_P(InternodeRoundTest, TwoNodesOfTwo) {
  const NodesAndWidth grid{2, 2};
  run_rounds(cluster_of(grid), std::vector{shape_of(grid, 16, 1), shape_of(grid, 70, 2)}, {}, buffer_of(grid));
}

/// More nodes than a warp has lanes; the largest NVLink domain.
TEST_P(InternodeRoundTest, ManyRanks) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "too many fibers";
  for (const NodesAndWidth grid : {NodesAndWidth{34, 1}, {1, 72}}) {
    ClusterOptions options = cluster_of(grid);
    options.host = {.multiprocessors = 1, .warps_per_block = grid.nodes == 1 ? 2 : 3};
    run_rounds(options, std::vector{shape_of(grid, 3, 1)}, {}, buffer_of(grid));
  }
}

/// As many ranks as a mask of bits has had, and more.
TEST_P(InternodeRoundTest, ExhaustiveSixteenNodesOfEight) {
  for (const NodesAndWidth grid : {NodesAndWidth{16, 8}, {18, 8}}) {
    ClusterOptions options = cluster_of(grid);
    options.host = {.multiprocessors = 1, .warps_per_block = 2};
    Shape shape = shape_of(grid, 2, 1);
    shape.local_experts = 1;
    run_rounds(options, std::vector{shape}, {}, buffer_of(grid, std::size_t{2} << 20));
  }
}

/// Within a node and between nodes, over everything that may vary: rows come and go through the heap, through windows
/// of all sizes, or, where the heap is full, through the near window. A failure prints the seed: set DEEP_EP_TEST_SEED
/// to repeat it.
TEST_P(InternodeRoundTest, RandomRoundsMatchTheOracle) {
  oracle::Random random(seed_);
  const NodesAndWidth grids[] = {{2, 1}, {1, 2}, {2, 2}, {1, 1}, {2, 4}, {1, 3}, {4, 2}, {1, 5},
                                 {3, 3}, {1, 4}, {5, 1}, {1, 2}, {2, 3}, {1, 8}, {3, 2}, {2, 8}};
  constexpr std::int64_t kGrids = std::size(grids);
  // Under sanitizers without the last grid: so many fibers are slow there, and the others show as much.
  const std::int64_t usual = under_thread_sanitizer() ? 4 : under_sanitizer() ? 2 * kGrids - 1 : 5 * kGrids / 2;
  const auto buffers = environment_number("DEEP_EP_TEST_ROUNDS", usual);
  for (std::int64_t i = 0; i < buffers; ++i) {
    const NodesAndWidth grid = grids[i % kGrids];
    ClusterOptions options = cluster_of(grid, random.chance(0.3) ? 0 : random.next());
    // Ranks share the CPUs with other tests: the more there are, the fewer blocks has each.
    options.host.multiprocessors = grid.ranks() > 9 ? 1 : static_cast<int>(1 + random.below(3));
    options.host.warps_per_block = static_cast<int>(1 + random.below(5));
    // Small enough for credits and many turns of a ring, large enough for two rows of each.
    // (A quarter of it holds a row of each rank.)
    const std::size_t small = std::size_t{grid.nodes == 1 ? 80u : 224u} << (grid.width > 4 ? 11 : 10);
    const std::size_t window_bytes = random.chance(0.6) ? small : 0;
    const double hoarders = random.chance(0.5) ? 0.6 : 0;  // ranks that have no room in their heaps
    std::vector<bool> hoards;
    for (int rank = 0; rank < grid.ranks(); ++rank) hoards.push_back(random.chance(hoarders));
    std::vector<Case> cases;
    std::vector<std::vector<RoundOptions>> rounds;  // where the rows lie, each rank chooses for itself
    for (int c = 0; c < 3; ++c) {
      const Shape shape =
          grid.nodes == 1 ? random_shape(random, grid.width) : random_shape_of_nodes(random, grid.nodes, grid.width);
      RoundOptions round;
      round.num_sms = grid.nodes == 1 ? static_cast<int>(random.below(5)) : 0;
      if (shape.with_topk && random.chance(0.3)) {
        round.num_worst_tokens = shape.max_tokens() * shape.ranks() + 1 + random.below(20);
      }
      round.use_layout_call = random.chance(0.5);
      rounds.emplace_back(hoards.size(), round);
      for (std::size_t rank = 0; rank < hoards.size(); ++rank) {
        rounds.back()[rank].returned_in_heap = !hoards[rank] && random.chance(0.6);
      }
      cases.push_back(make_case(shape));
    }
    SCOPED_TRACE("DEEP_EP_TEST_SEED=" + std::to_string(seed_) + ", buffer " + std::to_string(i));
    run_cluster(options, [&](Rank& rank) {
      const auto me = static_cast<std::size_t>(rank.rank());
      Buffer& buffer = rank.buffer(buffer_of(grid, window_bytes));
      std::vector<Tensor> hoard;
      if (hoards[me]) hoard = take_whole_heap(rank, buffer);
      for (std::size_t c = 0; c < cases.size(); ++c) {
        run_round(rank, buffer, cases[c], rounds[c][me]);
        rank.release();
      }
      hoard.clear();
      run_round(rank, buffer, cases.front(), rounds.front()[me]);
      buffer.destroy();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
