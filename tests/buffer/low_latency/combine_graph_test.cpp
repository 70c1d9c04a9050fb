// Combine with hooks in CUDA graphs, which the CPU plays, from the combine buffer and from a tensor.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyCombineGraphTest : public ClusterTest {};
constexpr Where kGraphPlaces[] = {{Target::host, Placement::threads}};
INSTANTIATE_TEST_SUITE_P(On, LowLatencyCombineGraphTest, testing::ValuesIn(kGraphPlaces), name_of_place);

template <class T>
void rewrite(Rank& rank, const ConstTensorView& view, const std::vector<T>& values) {
  rank.write(writable(view), std::as_bytes(std::span<const T>(values)));
}

/// Two calls are in flight at once. Each launch has other rows and weights, and a call in one launch, which uses the
/// same memory, comes in between.
TEST_P(LowLatencyCombineGraphTest, LaunchesWithHooksTakeTheInputsOfTheirTime) {
  DEEP_EP_NEEDS_RANKS(3);
  for (const auto& [layout, fp8] :
       {std::pair{LowLatencyLayout::expert_major, false}, std::pair{LowLatencyLayout::rank_major, false},
        std::pair{LowLatencyLayout::expert_major, true}}) {
    LowLatencyCombineCase one = make_low_latency_combine_case(
        {.tokens = {7, 0, 4}, .max_tokens = 7, .hidden = 256, .local_experts = 4, .topk = 4, .layout = layout});
    one.options.fp8 = fp8;
    LowLatencyCombineCase other = one;
    for (auto& input : other.inputs) {
      for (std::size_t i = 0; i < input.x.size(); i += 2) input.x[i] ^= 0x8000;
      for (float& weight : input.selection.weights) weight *= -0.75f;
    }
    const LowLatencyCombineCase* const launches[] = {&one, &other, &one};
    const auto hooked = [&](const LowLatencyCombineCase& of) { return of.expected_with_hooks(GetParam().topology); };
    run_cluster(cluster(3), [&](Rank& rank) {
      const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
      Buffer buffer(rank.bootstrap(), executor, low_latency_options(3, 7, 256));
      const auto me = static_cast<std::size_t>(rank.rank());
      const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
      const LowLatencyCombineArguments from_tensor = upload_combine(rank, one, handle);
      LowLatencyCombineArguments from_buffer = from_tensor;
      const TensorView in_heap = buffer.low_latency_combine_buffer(handle);
      from_buffer.x = in_heap;
      rewrite(rank, in_heap, one.inputs[me].x);

      LowLatencyCombineResult first, second;
      record(rank, *executor, [&] {
        first = buffer.low_latency_combine(with_hook(from_buffer), rank.call());
        second = buffer.low_latency_combine(with_hook(from_tensor), rank.call());
        first.hook();
        second.hook();
      });
      bool recorded = true;
      for (const LowLatencyCombineCase* launch : launches) {
        settle(rank, buffer);
        if (!recorded) {
          rewrite(rank, in_heap, launch->inputs[me].x);
          rewrite(rank, from_tensor.x, launch->inputs[me].x);
          rewrite(rank, from_tensor.topk_weights, launch->inputs[me].selection.weights);
          executor->replay();
          settle(rank, buffer);
        }
        recorded = false;
        for (const auto& call : {first, second}) {
          check_low_latency_combine(rank, *launch, hooked(*launch), call.combined_x.view());
        }
        const LowLatencyCombineResult plain = buffer.low_latency_combine(from_tensor, rank.call());
        check_low_latency_combine(rank, *launch, launch->expected(), plain.combined_x.view());
      }
      buffer.check();
      buffer.destroy();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
