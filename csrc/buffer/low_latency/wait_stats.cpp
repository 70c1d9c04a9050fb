#include "csrc/buffer/low_latency/wait_stats.hpp"

#include <algorithm>

#include "kernels/common/carver.hpp"

namespace deep_ep {

void enqueue_waits(const KernelTable& kernels, const LowLatencyWaitsParams& params, StreamHandle stream) {
  kernels.add_waits_low_latency(params, {1, kernels::add_waits_low_latency::kMaxThreads, 0}, stream);
}

WaitStats::WaitStats(Runtime& runtime, const LowLatencySetup& setup) : runtime_(runtime), common_(setup.common) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const auto carve = [&](Carver carver) {
    for (OfKind& kind : kinds_) {
      kind.cost = carver.take<std::int64_t>(ranks);
      kind.waited = carver.take<LowLatencyWaited>(ranks);
    }
    clock_ = carver.take<std::int64_t>(2);
    return carver.bytes();
  };
  memory_ = runtime.zeroed_memory<std::byte>(carve(Carver::without_memory()));
  carve(Carver(memory_.get()));
}

std::shared_ptr<const LowLatencyWaitsParams> WaitStats::measure(LowLatencyKind kind, int blocks,
                                                                std::int64_t*& wait_cost) const {
  const OfKind& of_kind = kinds_[static_cast<std::size_t>(kind)];
  const LowLatencyWaitsParams params{.common = common_,
                                     .cost = of_kind.cost,
                                     .given = wait_cost,
                                     .waited = of_kind.waited,
                                     .blocks = std::max(blocks, 1)};
  wait_cost = of_kind.cost;
  return std::make_shared<const LowLatencyWaitsParams>(params);
}

void WaitStats::measure(LowLatencyDispatchPlan& plan) const {
  plan.waits = measure(LowLatencyKind::dispatch, 1, plan.params.wait_cost);
}

void WaitStats::measure(LowLatencyCombinePlan& plan) const {
  const int blocks = plan.receive ? plan.receive->working_blocks : plan.first.working_blocks;
  plan.waits = measure(LowLatencyKind::combine, std::min(plan.params.num_tokens, blocks), plan.params.wait_cost);
}

LowLatencyStats WaitStats::read(StreamHandle stream) const {
  Backend& executor = *runtime_.executor();
  const auto ranks = static_cast<std::size_t>(runtime_.num_ranks());
  CallScope scope(runtime_.calls(), {.stream = stream});
  enqueue_waits(executor.kernels(), {.common = common_, .clock = clock_}, scope.stream());
  std::array<std::int64_t, 2> cycles_and_ns{};
  std::array<std::vector<LowLatencyWaited>, kLowLatencyKinds> waited;
  executor.copy(cycles_and_ns.data(), clock_, sizeof cycles_and_ns, scope.stream());
  for (std::size_t kind = 0; kind < waited.size(); ++kind) {
    waited[kind].resize(ranks);
    const std::size_t bytes = ranks * sizeof(LowLatencyWaited);
    executor.copy(waited[kind].data(), kinds_[kind].waited, bytes, scope.stream());
  }
  executor.synchronize(scope.stream());
  scope.finish();

  const double us_per_cycle =
      static_cast<double>(cycles_and_ns[1]) / static_cast<double>(std::max<std::int64_t>(cycles_and_ns[0], 1)) * 1e-3;
  const auto in_us = [&](LowLatencyKind kind) {
    LowLatencyWaitTimes times;
    for (const LowLatencyWaited& source : waited[static_cast<std::size_t>(kind)]) {
      times.calls.push_back(source.calls);
      times.total_us.push_back(static_cast<double>(source.cycles) * us_per_cycle);
      times.longest_us.push_back(static_cast<double>(source.longest) * us_per_cycle);
    }
    return times;
  };
  return {.dispatch = in_us(LowLatencyKind::dispatch), .combine = in_us(LowLatencyKind::combine)};
}

}  // namespace deep_ep
