// Ranks as processes: heaps of other processes, other addresses for the same memory, peers that die.
#include <unistd.h>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class ProcessesTest : public ClusterTest {
 protected:
  bool processes_have_threads() const override { return true; }  // those that look after the others
};
DEEP_EP_ON_PROCESSES(ProcessesTest);

std::vector<Shape> shapes_for(int ranks) {
  const auto counts = oracle::make_token_counts(oracle::TokenCounts::different, ranks, 30, 5);
  return {{.tokens = equal_tokens(ranks, 12), .combine_hidden = 128, .bias_0 = true, .seed = 1},
          {.tokens = counts,
           .routing = oracle::Routing::some_dropped,
           .dtype = DType::float8_e4m3,
           .hidden = 256,
           .scales = 2,
           .scale_layout = ScaleLayout::column_major,
           .seed = 2},
          {.tokens = counts, .with_topk = false, .hidden = 1024, .combine_hidden = 1024, .seed = 3}};
}

TEST_P(ProcessesTest, FourRanks) {
  DEEP_EP_NEEDS_RANKS(4);
  for (const bool heap : {true, false}) run_rounds(cluster(4), shapes_for(4), {.config = {}, .returned_in_heap = heap});
}

}  // namespace
}  // namespace deep_ep::test
