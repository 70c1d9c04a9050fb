// One host that plays several nodes.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class NodesTest : public ClusterTest {};
DEEP_EP_ON_THREADS(NodesTest);

TEST_P(NodesTest, TheirSizeMustDivideTheRanks) {
  DEEP_EP_NEEDS_RANKS(3);
  run_cluster(cluster(3), [&](Rank& rank) {
    require_throws<InvalidArgument>(
        [&] { rank.own_buffer({.heap_bytes = std::size_t{16} << 20, .ranks_per_node = 2}); },
        {"ranks_per_node is 2", "divides the 3 ranks"}, "nodes of two of three ranks");
  });
}

}  // namespace
}  // namespace deep_ep::test
