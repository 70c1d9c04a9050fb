// Who is named between nodes when ranks wait for each other in vain: kernels/internode/find_lost_rank.cu.
#include <map>
#include <string>

#include "csrc/buffer/internode/internode.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/support/format.hpp"
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

/// Ranks, each with the one that it has waited for. Whoever is not in it tells nothing.
using Waits = std::map<int, int>;

class InternodeLostRankTest : public ClusterTest {
 protected:
  /// All ranks of `waits` look for the lost one, and must name `lost`. It lives: what is lost is its word. `tells`: a
  /// rank of them that has met the failure of an operation before, and only tells.
  void expect_lost(int ranks, const Waits& waits, int lost, int tells = -1) {
    run_cluster(cluster(ranks), [&](Rank& rank) {
      Runtime runtime(rank.bootstrap(), rank.executor(),
                      {.heap_bytes = std::size_t{16} << 20, .timeout_s = 2 * short_deadline(), .ranks_per_node = 2});
      Internode internode(runtime);
      rank.bootstrap()->barrier();
      const auto mine = waits.find(rank.rank());
      if (rank.rank() == tells) internode.find_lost_rank(mine->second, mine->second, false);
      if (tells != -1) rank.bootstrap()->barrier();
      if (mine != waits.end() && rank.rank() != tells) {
        const int named = internode.find_lost_rank(mine->second);
        require(named == lost, fmt::format("rank {} names rank {} instead of {}", rank.rank(), named, lost));
      }
      rank.bootstrap()->barrier();
      internode.drain();
      rank.bootstrap()->barrier();
      runtime.unmap_peers_together();
    });
  }
};

DEEP_EP_ON_THREADS(InternodeLostRankTest);

/// The lost rank is the rail of rank 1, which thus hears by rank 0 alone for whom rank 2 has waited.
TEST_P(InternodeLostRankTest, NewsOfRailsReachTheRestOfTheNode) {
  DEEP_EP_NEEDS_RANKS(4);
  expect_lost(4, {{0, 2}, {1, 0}, {2, 3}}, 3);
}

/// Ranks 4 and 5 hear of rank 1, and rank 0 of rank 5, by a rail that tells what its node knows.
TEST_P(InternodeLostRankTest, NewsOfTheNodeReachAllRails) {
  DEEP_EP_NEEDS_RANKS(6);
  expect_lost(6, {{0, 4}, {1, 3}, {2, 0}, {4, 5}, {5, 1}}, 3);
}

/// Rank 0 has seen an operation to rank 2 fail. Its node hears of that, and other nodes by its node.
TEST_P(InternodeLostRankTest, WhoMeetsAFailureTellsWithoutSearching) {
  DEEP_EP_NEEDS_RANKS(4);
  expect_lost(4, {{0, 2}, {1, 0}, {3, 1}}, 2, 0);
}

/// Its rail hears of it by itself, also where the rest of its node has all that it needs.
TEST_P(InternodeLostRankTest, WhoMeetsAFailureTellsItsRails) {
  DEEP_EP_NEEDS_RANKS(6);
  expect_lost(6, {{0, 2}, {4, 0}, {5, 4}}, 2, 0);
}

}  // namespace
}  // namespace deep_ep::test
