// get_dispatch_layout against the oracle.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class LayoutTest : public ClusterTest {
 protected:
  /// Layouts of all shapes on one buffer.
  void run_layouts(const std::vector<Shape>& shapes) {
    std::vector<Case> cases;
    for (const Shape& shape : shapes) cases.push_back(make_case(shape));
    run_with_buffers(cluster(shapes.front().ranks()), [&](Rank& rank, Buffer& buffer) {
      for (const Case& one : cases) {
        const Inputs inputs = upload_inputs(rank, one);
        const DispatchLayout layout = buffer.get_dispatch_layout(inputs.topk_idx, one.shape.experts(), rank.call());
        try {
          check_layout(rank, one, layout);
        } catch (const CheckFailure& failure) {
          throw CheckFailure(failure.what() + (" with " + one.shape.describe()));
        }
        rank.release();
      }
    });
  }
};
DEEP_EP_ON_THREADS(LayoutTest);

TEST_P(LayoutTest, EveryRoutingAndIndexWidth) {
  DEEP_EP_NEEDS_RANKS(3);
  std::vector<Shape> shapes;
  for (const auto routing : oracle::kRoutings) {
    for (const DType idx : {DType::int32, DType::int64}) {
      Shape shape{.tokens = {37, 5, 64}, .idx_dtype = idx, .routing = routing, .hidden = 8};
      shape.seed = shapes.size() + 1;
      shapes.push_back(shape);
    }
  }
  run_layouts(shapes);
}

/// Ranks of one host that play nodes; there need not be a way between these.
TEST_P(LayoutTest, CountsPerNode) {
  DEEP_EP_NEEDS_RANKS(6);
  std::vector<Case> cases;
  for (const auto routing : oracle::kRoutings) {
    cases.push_back(make_case({.tokens = {37, 0, 40, 5, 1, 9}, .topk = 3, .routing = routing, .hidden = 8}));
  }
  run_cluster(cluster(6), [&](Rank& rank) {
    for (const int per_node : {6, 3, 2, 1}) {
      Buffer& buffer = rank.buffer({.ranks_per_node = per_node});
      require(buffer.num_nodes() == 6 / per_node, "num_nodes: " + std::to_string(buffer.num_nodes()));
      for (const Case& one : cases) {
        const Inputs inputs = upload_inputs(rank, one);
        const DispatchLayout layout = buffer.get_dispatch_layout(inputs.topk_idx, one.shape.experts(), rank.call());
        check_layout(rank, one, layout);
        if (per_node == 6) {
          require(!layout.num_tokens_per_node.defined(), "num_tokens_per_node of one node");
        } else {
          check_node_counts(rank, one, 6 / per_node, layout);
        }
        rank.release();
      }
    }
  });
}

}  // namespace
}  // namespace deep_ep::test
