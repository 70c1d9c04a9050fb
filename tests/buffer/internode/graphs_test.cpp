// Calls between nodes in CUDA graphs, which the CPU plays.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr std::int64_t kWorstTokens = 128;

Case two_nodes_of_two(std::uint64_t seed) {
  return make_case({.tokens = {13, 0, 30, 9}, .local_experts = 2, .ranks_per_node = 2, .seed = seed});
}

class InternodeGraphTest : public ClusterTest {};
DEEP_EP_ON_THREADS(InternodeGraphTest);

/// Each launch has other inputs, and calls that are not recorded come between. The rows lie in the heap, or are pushed.
TEST_P(InternodeGraphTest, LaunchesTakeTheInputsOfTheirTime) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  const Case cases[] = {two_nodes_of_two(1), two_nodes_of_two(2), two_nodes_of_two(3)};
  for (const bool in_heap : {true, false}) {
    if (under_thread_sanitizer() && !in_heap) continue;  // threads wait as in calls that are not recorded
    run_cluster(cluster(4), [&](Rank& rank) {
      const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
      Buffer buffer(rank.bootstrap(), executor,
                    {.heap_bytes = std::size_t{8} << 20, .window_bytes = std::size_t{24} << 10, .ranks_per_node = 2});
      run_round(rank, buffer, cases[2]);
      Inputs inputs = upload_inputs(rank, cases[0]);
      inputs.dispatch.num_worst_tokens = kWorstTokens;
      settle(rank, buffer);
      DispatchLayout layout;
      DispatchResult received;
      CombineResult combined;
      record(rank, *executor, [&] {
        layout = buffer.get_dispatch_layout(inputs.topk_idx, cases[0].shape.experts(), rank.call());
        inputs.dispatch.use(layout);
        received = buffer.dispatch(inputs.dispatch, rank.call());
      });
      const Returned returned = upload_returned(rank, buffer, cases[0], received.handle, in_heap);
      record(rank, *executor, [&] { combined = buffer.combine(returned.combine, rank.call()); });

      const auto overwrite = [&](const ConstTensorView& view, const auto& values) {
        rank.write(writable(view), std::as_bytes(std::span(values)));
      };
      const auto me = static_cast<std::size_t>(rank.rank());
      for (const Case& one : cases) {
        settle(rank, buffer);
        if (&one != cases) {
          overwrite(inputs.dispatch.x, one.inputs[me].x);
          overwrite(inputs.topk_idx, one.selections[me].idx);
          overwrite(*inputs.dispatch.topk_weights, one.selections[me].weights);
          overwrite(returned.combine.x, one.returned[me].x);
          overwrite(*returned.combine.topk_weights, one.returned[me].topk_weights);
          executor->replay();
          settle(rank, buffer);
        }
        check_dispatch(rank, one, received, {.cached = false, .num_worst_tokens = kWorstTokens});
        check_combine(rank, one, combined);
        run_round(rank, buffer, cases[1], {.returned_in_heap = in_heap});
      }
      buffer.destroy();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
