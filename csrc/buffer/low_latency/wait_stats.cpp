#include "csrc/buffer/low_latency/wait_stats.hpp"

#include <algorithm>

#include "kernels/common/carver.hpp"

namespace deep_ep {
namespace {

/// How long a kernel listens for dispatch's counts before the receive part goes on waiting. No longer than it may take
/// until somebody finds out that this rank shows no sign of life meanwhile (transport/watch.hpp).
constexpr std::uint64_t kMostPatienceNs = 100'000'000;
constexpr std::uint64_t kPatiencesInTimeout = 16;

LaunchShape shape_of(LowLatencyWaitsStep step, int num_ranks) {
  const std::size_t counts = step == LowLatencyWaitsStep::add ? static_cast<std::size_t>(num_ranks) * 4 : 0;
  if (step == LowLatencyWaitsStep::add) return {1, kernels::add_waits_low_latency::kMaxThreads, counts};
  return {1, step == LowLatencyWaitsStep::listen ? (num_ranks + 31) / 32 * 32 : 32, 0};
}

}  // namespace

void enqueue_waits(const KernelTable& kernels, const LowLatencyWaitsParams& params, StreamHandle stream) {
  kernels.add_waits_low_latency(params, shape_of(params.step, params.common.num_ranks), stream);
}

WaitStats::WaitStats(Runtime& runtime, const LowLatencySetup& setup) : runtime_(runtime), common_(setup.common) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const auto carve = [&](Carver carver) {
    for (OfKind& kind : kinds_) {
      kind.cost = carver.take<std::int64_t>(ranks);
      kind.heard = carver.take<LowLatencyHeard>(ranks);
      kind.waited = carver.take<LowLatencyWaited>(ranks);
    }
    clock_ = carver.take<std::int64_t>(2);
    return carver.bytes();
  };
  memory_ = runtime.zeroed_memory<std::byte>(carve(Carver::without_memory()));
  carve(Carver(memory_.get()));
}

LowLatencyWaitsParams WaitStats::params(LowLatencyKind kind) const {
  LowLatencyWaitsParams params{};
  params.common = common_;
  params.kind = kind;
  const std::uint64_t timeout = runtime_.faults().wait_context().timeout_ns;
  params.patience_ns =
      timeout == 0 ? kMostPatienceNs : std::clamp<std::uint64_t>(timeout / kPatiencesInTimeout, 1, kMostPatienceNs);
  params.cost = of(kind).cost;
  params.heard = of(kind).heard;
  params.waited = of(kind).waited;
  params.clock = clock_;
  return params;
}

void WaitStats::measure(LowLatencyDispatchPlan& plan) const {
  LowLatencyWaitsParams waits = params(LowLatencyKind::dispatch);
  waits.given = plan.params.wait_cost;
  plan.params.wait_cost = waits.cost;
  waits.step = LowLatencyWaitsStep::add;
  LowLatencyWaits both{.listens = {}, .adds = waits};
  if (plan.receive) {
    waits.step = LowLatencyWaitsStep::listen;
    both.listens = waits;
  }
  plan.waits = std::make_shared<const LowLatencyWaits>(both);
}

void WaitStats::measure(LowLatencyCombinePlan& plan) const {
  LowLatencyWaitsParams waits = params(LowLatencyKind::combine);
  waits.given = plan.params.wait_cost;
  plan.params.wait_cost = waits.cost;
  waits.step = LowLatencyWaitsStep::add;
  waits.blocks = plan.receive ? plan.receive->working_blocks : plan.first.working_blocks;
  waits.num_tokens = plan.params.num_tokens;
  waits.num_topk = plan.params.num_topk;
  waits.num_local_experts = plan.params.num_local_experts;
  waits.topk_idx = plan.params.topk_idx;
  plan.waits = std::make_shared<const LowLatencyWaits>(LowLatencyWaits{.listens = {}, .adds = waits});
}

LowLatencyStats WaitStats::read(StreamHandle stream, bool reset) const {
  Backend& executor = *runtime_.executor();
  const auto ranks = static_cast<std::size_t>(runtime_.num_ranks());
  CallScope scope(runtime_.calls(), {.stream = stream});
  LowLatencyWaitsParams clock = params(LowLatencyKind::dispatch);
  clock.step = LowLatencyWaitsStep::clock;
  enqueue_waits(executor.kernels(), clock, scope.stream());
  std::array<std::int64_t, 2> cycles_and_ns{};
  std::array<std::vector<LowLatencyWaited>, kLowLatencyKinds> waited;
  executor.copy(cycles_and_ns.data(), clock_, sizeof cycles_and_ns, scope.stream());
  for (std::size_t kind = 0; kind < waited.size(); ++kind) {
    waited[kind].resize(ranks);
    const std::size_t bytes = ranks * sizeof(LowLatencyWaited);
    executor.copy(waited[kind].data(), kinds_[kind].waited, bytes, scope.stream());
    if (reset) executor.fill(kinds_[kind].waited, 0, bytes, scope.stream());
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
  return {
      .rank = runtime_.rank(), .dispatch = in_us(LowLatencyKind::dispatch), .combine = in_us(LowLatencyKind::combine)};
}

}  // namespace deep_ep
