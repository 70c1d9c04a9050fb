#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/intranode/plan.hpp"
#include "csrc/buffer/row_stages.hpp"
#include "csrc/support/format.hpp"
#include "kernels/intranode/dispatch_shared.hpp"

namespace deep_ep {
namespace {

LaunchShape plan_launch(DispatchParams& params, const Config& config, const NormalModeSetup& setup) {
  const LaunchPolicy& policy = setup.policy;
  const int warps = config.warps_per_block != 0 ? config.warps_per_block : policy.warps_per_block;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::dispatch_default(setup.num_ranks).num_sms;
  const int useful = std::max(1, (params.num_tokens + warps - 1) / warps);
  const auto shared_bytes = [&](int stages, std::uint32_t stage_bytes) {
    return DispatchShared(Carver::without_memory(), setup.num_ranks, warps, stages, stage_bytes).bytes;
  };
  const std::size_t per_warp =
      (policy.max_shared_bytes - shared_bytes(RowStages::kMost, 0)) / static_cast<std::size_t>(warps);
  const RowStages stages = RowStages::make(per_warp, params.rows.row_bytes);
  params.stages = stages.count;
  params.stage_bytes = stages.bytes;
  return LaunchShape{std::min({sms, policy.multiprocessors, useful}), warps * 32,
                     shared_bytes(stages.count, stages.bytes)};
}

template <class Arguments>
DispatchPlan plan_any_dispatch(const Arguments& arguments, const NormalModeSetup& setup) {
  DispatchPlan plan;
  static_cast<SentRows&>(plan.params) = sent_rows(arguments, setup);
  plan.shape = plan_launch(plan.params, arguments.config, setup);
  return plan;
}

}  // namespace

NotifyPlan plan_notify(const DispatchArguments& arguments, const NormalModeSetup& setup) {
  return {.params = {notify_call(arguments, setup), {}},
          .shape = {std::min(setup.num_ranks, setup.policy.multiprocessors),
                    setup.on_gpu() ? kernels::notify::kMaxThreads : setup.policy.warps_per_block * 32,
                    sizeof(NotifyShared)}};
}

DispatchPlan plan_dispatch(const DispatchArguments& arguments, const NormalModeSetup& setup) {
  return plan_any_dispatch(arguments, setup);
}

DispatchPlan plan_dispatch(const CachedDispatchArguments& arguments, const NormalModeSetup& setup) {
  return plan_any_dispatch(arguments, setup);
}

void plan_window(DispatchParams& params, std::byte* window, const NormalModeSetup& setup) {
  const std::size_t row = params.rows.all_bytes();
  const auto ranks = static_cast<std::size_t>(setup.num_ranks);
  const std::size_t padding = RowTargets::kParts * kLine;
  const std::size_t rows = (setup.window_bytes - std::min(setup.window_bytes, padding)) / (row * ranks);
  if (rows == 0) {
    fail<OutOfMemory>(
        "a heap of {} cannot hold the {} rows of this dispatch, and its window of {} not one row of {} "
        "from each of the {} ranks: raise heap_bytes or window_bytes",
        format_bytes(setup.heap_bytes), params.output_rows, format_bytes(setup.window_bytes), format_bytes(row),
        setup.num_ranks);
  }
  params.window_rows = static_cast<std::uint32_t>(std::min<std::size_t>(rows, INT32_MAX / ranks));
  check_range("rounds that the rows take through the window (raise window_bytes)",
              params.output_rows / params.window_rows + 1, 1, kMostRounds);
  params.window = RowTargets::carve(Carver(window), params.rows, ranks * params.window_rows);
}

}  // namespace deep_ep
