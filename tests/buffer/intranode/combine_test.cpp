// Combine: pulling, pushing and both at once give the same bits; biases, weights, the automatic choice.
#include <algorithm>

#include "kernels/normal/layout.hpp"
#include "kernels/normal/params.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

/// On the CPU: fills the local rings before every combine, and keeps where they lie.
class WindowFillingExecutor final : public CountingExecutor {
 public:
  static constexpr std::byte kUntouched{0xa5};
  using CountingExecutor::CountingExecutor;

  LocalRings rings;
  std::byte* heap = nullptr;

  const KernelTable& kernels() const override {
    static thread_local KernelTable table;
    table = CountingExecutor::kernels();
    launching_ = {&CountingExecutor::kernels(), const_cast<WindowFillingExecutor*>(this)};
    table.combine = &combine;
    return table;
  }

  /// Of the ring that belongs to `source`: whether anything was written to it.
  bool written(int source) const {
    const std::byte* ring = rings.slot(source, 0).in(heap);
    return std::any_of(ring, ring + bytes_of_ring(), [](std::byte byte) { return byte != kUntouched; });
  }

 private:
  struct Launching {
    const KernelTable* kernels;
    WindowFillingExecutor* executor;
  };
  static inline thread_local Launching launching_;

  std::size_t bytes_of_ring() const { return static_cast<std::size_t>(rings.slots) * rings.slot_bytes; }

  static void combine(const CombineParams& params, const LaunchShape& shape, void* stream) {
    WindowFillingExecutor& executor = *launching_.executor;
    executor.rings = params.transfer.local;
    executor.heap = params.transfer.common.own_heap();
    const auto ranks = static_cast<std::size_t>(params.transfer.common.num_ranks);
    std::fill_n(executor.rings.slot(0, 0).in(executor.heap), ranks * executor.bytes_of_ring(), kUntouched);
    launching_.kernels->combine(params, shape, stream);
  }
};

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

TEST_P(CombineTest, OwnRowsAreReadWhereTheyLie) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "looks into the heap";
  const Case one = make_case(with_everything({20, 9, 31}));
  run_cluster(cluster(3), [&](Rank& rank) {
    const auto executor = std::make_shared<WindowFillingExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), executor, {.heap_bytes = std::size_t{64} << 20});
    const DispatchResult dispatched = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const Returned returned = upload_returned(rank, buffer, one, dispatched.handle, false);
    check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
    for (int source = 0; source < rank.size(); ++source) {
      require(executor->written(source) == (source != rank.rank()), "the ring of " + std::to_string(source));
    }
    buffer.destroy();
  });
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

TEST_P(CombineTest, AddsNoOneOrTwoBiases) {
  DEEP_EP_NEEDS_RANKS(2);
  std::vector<Shape> shapes;
  for (const int biases : {0, 1, 2, 3}) {
    for (const auto routing : {oracle::Routing::uniform, oracle::Routing::all_dropped}) {
      shapes.push_back({.tokens = {13, 18},
                        .routing = routing,
                        .bias_0 = (biases & 1) != 0,
                        .bias_1 = (biases & 2) != 0,
                        .seed = shapes.size() + 1});
    }
  }
  for (const bool heap : {true, false}) run_rounds(cluster(2), shapes, {.num_sms = 0, .returned_in_heap = heap});
}

TEST_P(CombineTest, EveryWidth) {
  DEEP_EP_NEEDS_RANKS(2);
  std::vector<Shape> shapes;
  for (const std::int64_t hidden : ends_of<std::int64_t>({8, 16, 56, 64, 72, 1024, 4096, 7168, 16384})) {
    shapes.push_back({.tokens = {6, 4}, .topk = 3, .combine_hidden = hidden, .seed = shapes.size() + 1});
  }
  for (const bool heap : {true, false}) run_rounds(cluster(2), shapes, {.num_sms = 0, .returned_in_heap = heap});
}

TEST_P(CombineTest, WeightsComeBackBitForBit) {
  DEEP_EP_NEEDS_RANKS(3);
  const Case one = make_case({.tokens = {25, 3, 12},
                              .local_experts = 8,
                              .topk = 8,
                              .routing = oracle::Routing::some_dropped,
                              .combine_weights = false});
  run_with_buffers(cluster(3), [&](Rank& rank, Buffer& buffer) {
    const DispatchResult result = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const auto& sent = one.selections[static_cast<std::size_t>(rank.rank())];
    std::vector<float> expected = sent.weights;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (sent.idx[i] < 0) expected[i] = 0.0f;
    }
    for (const bool heap : {true, false}) {
      Returned returned = upload_returned(rank, buffer, one, result.handle, heap);
      returned.combine.topk_weights = result.recv_topk_weights->view();
      const CombineResult combined = buffer.combine(returned.combine, rank.call());
      require(combined.combined_topk_weights.has_value(), "combined_topk_weights is missing");
      require_same(expected, rank.download<float>(combined.combined_topk_weights->view()), "combined_topk_weights", 8);
    }
  });
}

}  // namespace
}  // namespace deep_ep::test
