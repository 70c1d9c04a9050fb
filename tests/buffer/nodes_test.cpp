// One host that plays several nodes.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class NodesTest : public ClusterTest {};
DEEP_EP_ON_THREADS(NodesTest);

TEST_P(NodesTest, NormalModeIsForOne) {
  DEEP_EP_NEEDS_RANKS(4);
  const Case one = make_case({.tokens = {3, 2, 4, 1}});
  run_cluster(cluster(4), [&](Rank& rank) {
    const auto uploaded = upload_inputs(rank, one);
    {
      Buffer whole = rank.own_buffer({.heap_bytes = std::size_t{16} << 20, .ranks_per_node = 4});
      check_dispatch(rank, one, whole.dispatch(uploaded.dispatch, rank.call()));
      whole.destroy();
    }
    Buffer halves = rank.own_buffer({.heap_bytes = std::size_t{16} << 20, .ranks_per_node = 2});
    const std::string far = "rank " + std::to_string(rank.rank() < 2 ? 2 : 0);
    require_throws<InvalidArgument>([&] { halves.dispatch(uploaded.dispatch, rank.call()); },
                                    {"Buffer::dispatch", "2 nodes", far, "low-latency"}, "dispatch between nodes");
    halves.check();
    halves.destroy();
  });
}

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
