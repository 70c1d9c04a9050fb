// dispatch: exchange counts (unless a handle knows them), make room, send.
#include <array>

#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"

namespace deep_ep {

DispatchHandle Intranode::notify(const DispatchArguments& arguments, CallScope& scope) {
  NotifyPlan plan = plan_notify(arguments, setup_);
  DispatchHandle handle;
  handle.num_tokens = arguments.x.size(0);
  handle.num_experts = num_experts(arguments);
  handle.num_topk = arguments.topk_idx ? static_cast<int>(arguments.topk_idx->size(1)) : 0;
  const std::array wanted = {unplaced(setup_.device, DType::int32, {setup_.num_ranks, setup_.num_ranks}),
                             unplaced(setup_.device, DType::int32, {handle.num_tokens, setup_.num_ranks})};
  const std::vector<Tensor> tables = scope.pool_tensors(wanted);
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];

  const bool exact = arguments.num_worst_tokens == 0;
  HostCounts& counts = *host_counts_;
  plan.params.common = common_;
  plan.params.wait = runtime_.faults().wait_context();
  plan.params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  plan.params.destination_row = handle.destination_row.as<std::int32_t>();
  plan.params.host_counts = exact ? &counts : nullptr;
  if (exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  runtime_.executor()->kernels().notify(plan.params, plan.shape, scope.stream());

  if (!exact) handle.num_recv_rows = arguments.num_worst_tokens;
  return handle;
}

void Intranode::learn_sizes(const DispatchArguments& arguments, CallScope& scope, DispatchResult& result) {
  if (arguments.num_worst_tokens != 0) return;
  const HostCounts& counts = *host_counts_;
  wait_for_counts(runtime_, counts, scope);
  result.handle.num_recv_rows = counts.num_recv_tokens;
  const int experts = result.handle.num_experts / setup_.num_ranks;
  result.num_recv_tokens_per_expert.assign(counts.tokens_per_expert, counts.tokens_per_expert + experts);
}

void Intranode::send(DispatchPlan& plan, const DispatchHandle& handle, const DispatchOutputs& outputs,
                     std::int64_t rows, CallScope& scope) {
  DispatchParams& params = plan.params;
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.output = outputs.targets();
  params.output_rows = rows;
  if (!outputs.in_heap) plan_window(params, runtime_.window(), setup_);
  runtime_.executor()->kernels().dispatch(params, plan.shape, scope.stream());
}

void Intranode::hand_out(const DispatchOutputs& outputs, const DispatchHandle& handle, CallScope& scope) {
  const Tensor* const used[] = {
      &outputs.x,       &outputs.scales,         &outputs.topk_idx,         &outputs.topk_weights,
      &outputs.src_idx, &handle.destination_row, &handle.rank_prefix_matrix};
  for (const Tensor* tensor : used) scope.hand_out(*tensor);
}

std::optional<DispatchOutputs> Intranode::landing(const ConstTensorView& x,
                                                  const std::optional<ConstTensorView>& x_scales,
                                                  const DispatchArguments* fresh, const DispatchOutputs& outputs,
                                                  const DispatchPlan& plan) {
  if (outputs.in_heap) return std::nullopt;
  return outputs_in_window(x, x_scales, fresh, outputs.x.size(0), plan.params.rows, runtime_.window(),
                           runtime_.layout().window_bytes);
}

void Intranode::copy_received(const DispatchPlan& plan, const DispatchHandle& handle, const DispatchOutputs& landed,
                              const DispatchOutputs& outputs, CallScope& scope) {
  const int ranks = common_.num_ranks;
  CopyReceivedParams params{};
  params.rows = plan.params.rows;
  params.from = landed.targets();
  params.to = outputs.targets();
  params.num_rows = handle.num_recv_rows;
  params.num_valid = plan.params.rank_prefix_matrix + (ranks - 1) * ranks + common_.rank;
  const Backend& executor = *runtime_.executor();
  const LaunchShape shape = shape_for_pipelines(params.num_rows, params.rows.row_bytes, executor.policy(),
                                                kernels::copy_received::kMaxThreads, params.stages, params.stage_bytes);
  executor.kernels().copy_received(params, shape, scope.stream());
}

DispatchResult Intranode::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise(Faults::Notes::but_unknown_experts);
  DispatchPlan plan = plan_dispatch(arguments, setup_);
  CallScope scope(runtime_.calls(), call);
  check_recording(scope, arguments.num_worst_tokens == 0);

  // The counts of all ranks; then room for the rows: in the heap, where peers write them into place, or elsewhere, to
  // which they are copied from the window.
  DispatchResult result;
  result.handle = notify(arguments, scope);
  learn_sizes(arguments, scope, result);
  const std::int64_t rows = result.handle.num_recv_rows;
  const DispatchOutputs made = make_outputs(arguments.x, arguments.x_scales, &arguments, rows, scope);
  result.handle.recv_src_idx = made.src_idx;
  const std::optional<DispatchOutputs> landed = landing(arguments.x, arguments.x_scales, &arguments, made, plan);
  send(plan, result.handle, landed ? *landed : made, rows, scope);
  if (landed) copy_received(plan, result.handle, *landed, made, scope);
  hand_out(made, result.handle, scope);
  made.give_to(result, arguments);
  result.event = scope.finish();
  return result;
}

CachedDispatchResult Intranode::dispatch(const CachedDispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise();
  DispatchPlan plan = plan_dispatch(arguments, setup_);
  CallScope scope(runtime_.calls(), call);
  const DispatchHandle& handle = *arguments.handle;
  const DispatchOutputs made = make_outputs(arguments.x, arguments.x_scales, nullptr, handle.num_recv_rows, scope);
  const std::optional<DispatchOutputs> landed = landing(arguments.x, arguments.x_scales, nullptr, made, plan);
  send(plan, handle, landed ? *landed : made, handle.num_recv_rows, scope);
  if (landed) copy_received(plan, handle, *landed, made, scope);
  hand_out(made, handle, scope);
  CachedDispatchResult result;
  made.give_to(result, arguments);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
