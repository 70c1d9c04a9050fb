// Combine: pulling, copying, pushing and all at once give the same bits; biases, weights, the automatic choice.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class CombineTest : public ClusterTest {};
DEEP_EP_ON_THREADS(CombineTest);

/// One dispatch, then combines of rows that lie in each rank's heap (h), or are copied (c) or pushed (p), as the heap
/// is full. Rows of the second are written where those of the first lay: nobody may still read them.
TEST_P(CombineTest, EachRankChoosesForItself) {
  const Case one = make_case({.tokens = {20, 0, 31},
                              .topk = 6,
                              .routing = oracle::Routing::some_dropped,
                              .combine_hidden = 264,
                              .bias_0 = true,
                              .bias_1 = true,
                              .seed = 11});
  run_with_buffers(cluster(3), [&](Rank& rank, Buffer& buffer) {
    const DispatchResult dispatched = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    for (const std::string choices : {"hhh", "hhh", "ppp", "hph", "php", "hhp", "pph", "ccc", "cph", "hcp", "hhh"}) {
      const char choice = choices[static_cast<std::size_t>(rank.rank())];
      const Returned returned = upload_returned(rank, buffer, one, dispatched.handle, choice == 'h');
      require(buffer.in_heap(returned.combine.x) == (choice == 'h'), "in_heap");
      std::vector<Tensor> hoard = choice == 'h' ? std::vector<Tensor>() : take_whole_heap(rank, buffer);
      if (choice == 'c') {  // no earlier rows are left where the copy goes
        for (const Tensor& tensor : hoard) {
          rank.executor()->fill(tensor.data(), 0xff, tensor.view().bytes(), rank.call().stream);
        }
        hoard.clear();
      }
      check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
    }
  });
}

TEST_P(CombineTest, EveryWidth) {
  std::vector<Shape> shapes;
  for (const std::int64_t hidden : ends_of<std::int64_t>({8, 16, 56, 64, 72, 1024, 4096, 7168, 16384})) {
    shapes.push_back({.tokens = {6, 4}, .topk = 3, .combine_hidden = hidden, .seed = shapes.size() + 1});
  }
  for (const bool heap : {true, false}) run_rounds(cluster(2), shapes, {.num_sms = 0, .returned_in_heap = heap});
}

}  // namespace
}  // namespace deep_ep::test
