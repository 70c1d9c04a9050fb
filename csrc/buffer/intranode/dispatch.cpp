// dispatch: exchange counts (unless a handle knows them), make room, send.
#include <algorithm>
#include <array>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"
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

/// For rows that fit neither the heap nor the window at once: how they go through the window. OutOfMemory when it is
/// too small.
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

}  // namespace

DispatchHandle Intranode::notify(const DispatchArguments& arguments, CallScope& scope,
                                 std::vector<int>& tokens_per_expert) {
  DispatchHandle handle = begin_handle(arguments);
  const std::array wanted = {unplaced(setup_.device, DType::int32, {setup_.num_ranks, setup_.num_ranks}),
                             unplaced(setup_.device, DType::int32, {handle.num_tokens, setup_.num_ranks})};
  const std::vector<Tensor> tables = scope.pool_tensors(wanted);
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];

  const bool exact = arguments.num_worst_tokens == 0;
  HostCounts& counts = *host_counts_;
  NotifyParams params{notify_call(arguments, setup_), {}};
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.host_counts = exact ? &counts : nullptr;
  if (exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  const LaunchShape shape{std::min(setup_.num_ranks, setup_.policy.multiprocessors),
                          setup_.on_gpu() ? kernels::notify::kMaxThreads : setup_.policy.warps_per_block * 32,
                          sizeof(NotifyShared)};
  runtime_.executor()->kernels().notify(params, shape, scope.stream());

  handle.num_recv_rows = arguments.num_worst_tokens;
  if (exact) {
    wait_for_counts(runtime_, counts, scope);
    handle.num_recv_rows = counts.num_recv_tokens;
    tokens_per_expert.assign(counts.tokens_per_expert, counts.tokens_per_expert + params.num_local_experts);
  }
  return handle;
}

DispatchOutputs Intranode::send(const SentRows& sent, const Config& config, const ConstTensorView& x,
                                const std::optional<ConstTensorView>& x_scales, const DispatchArguments* fresh,
                                const DispatchHandle& handle, CallScope& scope) {
  DispatchParams params{};
  static_cast<SentRows&>(params) = sent;
  const LaunchShape shape = plan_launch(params, config, setup_);
  // Peers write rows into place in the heap. Elsewhere they are copied from the window, all at once if it holds all.
  DispatchOutputs outputs = make_outputs(x, x_scales, fresh, handle.num_recv_rows, scope);
  std::optional<DispatchOutputs> landed;
  if (!outputs.in_heap) {
    landed = outputs_in_window(x, x_scales, fresh, handle.num_recv_rows, params.rows, runtime_.window(),
                               runtime_.layout().window_bytes);
  }
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.output = (landed ? *landed : outputs).targets();
  params.output_rows = handle.num_recv_rows;
  if (!outputs.in_heap && !landed) plan_window(params, runtime_.window(), setup_);
  const KernelTable& kernels = runtime_.executor()->kernels();
  kernels.dispatch(params, shape, scope.stream());
  if (landed) {
    CopyReceivedParams copying{};
    copying.rows = params.rows;
    copying.from = landed->targets();
    copying.to = outputs.targets();
    copying.num_rows = handle.num_recv_rows;
    copying.num_valid = params.rank_prefix_matrix + (common_.num_ranks - 1) * common_.num_ranks + common_.rank;
    const LaunchShape all =
        shape_for_pipelines(copying.num_rows, copying.rows.row_bytes, runtime_.executor()->policy(),
                            kernels::copy_received::kMaxThreads, copying.stages, copying.stage_bytes);
    kernels.copy_received(copying, all, scope.stream());
  }
  const Tensor* const used[] = {
      &outputs.x,       &outputs.scales,         &outputs.topk_idx,         &outputs.topk_weights,
      &outputs.src_idx, &handle.destination_row, &handle.rank_prefix_matrix};
  for (const Tensor* tensor : used) scope.hand_out(*tensor);
  return outputs;
}

DispatchResult Intranode::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise(Faults::Notes::but_unknown_experts);
  CallScope scope(runtime_.calls(), call);
  DispatchResult result = dispatch(arguments, scope);
  result.event = scope.finish();
  return result;
}

DispatchResult Intranode::dispatch(const DispatchArguments& arguments, CallScope& scope) {
  check_recording(scope, arguments.num_worst_tokens == 0);
  DispatchResult result;
  result.handle = notify(arguments, scope, result.num_recv_tokens_per_expert);
  const DispatchOutputs outputs = send(sent_rows(arguments, setup_), arguments.config, arguments.x, arguments.x_scales,
                                       &arguments, result.handle, scope);
  result.handle.recv_src_idx = outputs.src_idx;
  outputs.give_to(result, arguments);
  return result;
}

CachedDispatchResult Intranode::dispatch(const CachedDispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  CachedDispatchResult result;
  send(sent_rows(arguments, setup_), arguments.config, arguments.x, arguments.x_scales, nullptr, *arguments.handle,
       scope)
      .give_to(result, arguments);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
