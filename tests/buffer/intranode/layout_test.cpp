// get_dispatch_layout against the oracle.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class LayoutTest : public ClusterTest {};
DEEP_EP_ON_THREADS(LayoutTest);

/// Ranks of one host that play nodes; there need not be a way between these.
TEST_P(LayoutTest, EveryRoutingIndexWidthAndNumberOfNodes) {
  std::vector<Case> cases;
  for (const auto routing : oracle::kRoutings) {
    for (const DType idx : {DType::int32, DType::int64}) {
      Shape shape{.tokens = {37, 0, 64, 1}, .topk = 3, .idx_dtype = idx, .routing = routing, .hidden = 8};
      shape.seed = cases.size() + 1;
      cases.push_back(make_case(shape));
    }
  }
  run_cluster(cluster(4), [&](Rank& rank) {
    for (const int per_node : {4, 2, 1}) {
      Buffer& buffer = rank.buffer({.ranks_per_node = per_node});
      require(buffer.num_nodes() == 4 / per_node, "num_nodes: " + std::to_string(buffer.num_nodes()));
      for (const Case& one : cases) {
        const Inputs inputs = upload_inputs(rank, one);
        const DispatchLayout layout = buffer.get_dispatch_layout(inputs.topk_idx, one.shape.experts(), rank.call());
        check_layout(rank, one, layout);
        if (per_node == 4) {
          require(!layout.num_tokens_per_node.defined(), "num_tokens_per_node of one node");
        } else {
          check_node_counts(rank, one, 4 / per_node, layout);
        }
        rank.release();
      }
    }
  });
}

}  // namespace
}  // namespace deep_ep::test
