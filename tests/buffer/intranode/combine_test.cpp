// Combine: pulling, pushing and both at once give the same bits; biases, weights, the automatic choice.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class CombineTest : public ClusterTest {
 protected:
  /// One dispatch, then a combine with each rank's rows in the heap or not, as `in_heap` says.
  void run(const Case& one, const std::vector<std::vector<bool>>& in_heap) {
    run_with_buffers(cluster(one.shape.ranks()), [&](Rank& rank, Buffer& buffer) {
      const DispatchResult dispatched = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
      for (const auto& choice : in_heap) {
        const bool heap = choice[static_cast<std::size_t>(rank.rank())];
        Returned returned = upload_returned(rank, buffer, one, dispatched.handle, heap);
        require(buffer.in_heap(returned.combine.x) == heap, "in_heap");
        check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
      }
    });
  }
};
DEEP_EP_ON_THREADS(CombineTest);

Shape with_everything(std::vector<std::int64_t> tokens) {
  return {.tokens = std::move(tokens),
          .topk = 6,
          .routing = oracle::Routing::some_dropped,
          .combine_hidden = 264,
          .bias_0 = true,
          .bias_1 = true,
          .seed = 11};
}

TEST_P(CombineTest, Pulls) {
  DEEP_EP_NEEDS_RANKS(3);
  // Rows of the second combine are written where those of the first lay: nobody may still read them.
  run(make_case(with_everything({20, 0, 31})), {{true, true, true}, {true, true, true}});
}

TEST_P(CombineTest, Pushes) {
  DEEP_EP_NEEDS_RANKS(3);
  run(make_case(with_everything({20, 0, 31})), {{false, false, false}});
}

TEST_P(CombineTest, EachRankChoosesForItself) {
  DEEP_EP_NEEDS_RANKS(3);
  run(make_case(with_everything({9, 24, 17})), {{true, false, true},
                                                {false, true, false},
                                                {true, true, false},
                                                {false, false, true},
                                                {true, true, true},
                                                {false, false, false}});
}

TEST_P(CombineTest, EveryWidth) {
  DEEP_EP_NEEDS_RANKS(2);
  std::vector<Shape> shapes;
  for (const std::int64_t hidden : ends_of<std::int64_t>({8, 16, 56, 64, 72, 1024, 4096, 7168, 16384})) {
    shapes.push_back({.tokens = {6, 4}, .topk = 3, .combine_hidden = hidden, .seed = shapes.size() + 1});
  }
  for (const bool heap : {true, false}) run_rounds(cluster(2), shapes, {.num_sms = 0, .returned_in_heap = heap});
}

}  // namespace
}  // namespace deep_ep::test
