// Low-latency dispatch against the oracle: shapes, layouts, formats, hooks, masks.
#include <algorithm>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {
namespace {

using oracle::Routing;
using oracle::RowFormat;

class LowLatencyDispatchTest : public ClusterTest {
 protected:
  /// One dispatch after the other on one buffer.
  void run(const ClusterOptions& options, const std::vector<LowLatencyCaseShape>& shapes,
           const LowLatencyDispatchArguments& how = {}) const {
    std::vector<LowLatencyCase> cases;
    std::int64_t max_tokens = 1;
    std::int64_t hidden = 1;
    for (const LowLatencyCaseShape& shape : shapes) {
      cases.push_back(make_low_latency_case(shape));
      max_tokens = std::max(max_tokens, shape.max_tokens);
      hidden = std::max(hidden, shape.hidden);
    }
    run_cluster(options, [&](Rank& rank) {
      Buffer& buffer = rank.buffer(low_latency_options(rank.size(), max_tokens, hidden));
      for (const LowLatencyCase& one : cases) {
        LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
        arguments.config = how.config;
        const LowLatencyDispatchResult result = buffer.low_latency_dispatch(arguments, rank.call());
        try {
          check_low_latency_dispatch(rank, one, result);
        } catch (const CheckFailure& failure) {
          throw CheckFailure(one.shape.describe() + ": " + failure.what());
        }
        rank.release();
      }
      buffer.check();
      buffer.destroy();
    });
  }
};
DEEP_EP_ON_THREADS(LowLatencyDispatchTest);

LowLatencyCaseShape equal_shape(int ranks, std::int64_t tokens) {
  return {.tokens = equal_tokens(ranks, tokens), .max_tokens = tokens};
}

TEST_P(LowLatencyDispatchTest, EveryFormatAndLayout) {
  DEEP_EP_NEEDS_RANKS(2);
  std::vector<LowLatencyCaseShape> shapes;
  for (const RowFormat format : oracle::kRowFormats) {
    for (const LowLatencyLayout layout : {LowLatencyLayout::expert_major, LowLatencyLayout::rank_major}) {
      LowLatencyCaseShape shape = equal_shape(2, 5);
      shape.hidden = 1024;
      shape.format = format;
      shape.layout = layout;
      shape.weights = layout == LowLatencyLayout::rank_major;
      shape.idx_dtype = layout == LowLatencyLayout::rank_major ? DType::int32 : DType::int64;
      shape.seed = shapes.size() + 1;
      shapes.push_back(shape);
    }
  }
  run(cluster(2), shapes);
}

}  // namespace
}  // namespace deep_ep::test
