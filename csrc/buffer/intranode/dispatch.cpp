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

DispatchOutputs Intranode::outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                                   const DispatchArguments* fresh, std::int64_t rows, const DispatchPlan& plan,
                                   const CallOptions& call, const CallScope& scope) {
  if (call.library_memory) {
    if (auto lent = in_window(x, x_scales, fresh, rows, plan)) return *std::move(lent);
  }
  return make_outputs(x, x_scales, fresh, rows, scope);
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
  return in_window(x, x_scales, fresh, outputs.x.size(0), plan);
}

std::optional<DispatchOutputs> Intranode::in_window(const ConstTensorView& x,
                                                    const std::optional<ConstTensorView>& x_scales,
                                                    const DispatchArguments* fresh, std::int64_t rows,
                                                    const DispatchPlan& plan) const {
  return outputs_in_window(x, x_scales, fresh, rows, plan.params.rows, runtime_.window(),
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
  check_recording(scope, arguments);

  // The counts of all ranks; then room for the rows: in the heap, where peers write them into place, or elsewhere, to
  // which they are copied from the window. If the window has room for as many rows as may come, they travel before this
  // host knows how many do: then no rank's kernel waits for another rank's host.
  DispatchResult result;
  result.handle = notify(arguments, scope);
  std::optional<DispatchOutputs> landed;
  if (arguments.num_worst_tokens == 0 && arguments.most_rows != 0) {
    landed = in_window(arguments.x, arguments.x_scales, &arguments, arguments.most_rows, plan);
    if (landed) send(plan, result.handle, *landed, arguments.most_rows, scope);
  }
  learn_sizes(arguments, scope, result);
  const std::int64_t rows = result.handle.num_recv_rows;
  if (landed && rows > arguments.most_rows) {
    scope.abandon();
    runtime_.calls().settle();
    try {
      runtime_.faults().raise();
    } catch (const OutOfMemory&) {  // the kernel's note of the same, which the next call would report
    }
    fail<InvalidArgument>("most_rows is {}, but {} rows come", arguments.most_rows, rows);
  }
  const bool early = landed.has_value();
  const DispatchOutputs made = early && call.library_memory
                                   ? landed->first(rows)
                                   : outputs(arguments.x, arguments.x_scales, &arguments, rows, plan, call, scope);
  result.handle.recv_src_idx = made.src_idx;
  if (!early) landed = landing(arguments.x, arguments.x_scales, &arguments, made, plan);
  if (!early) send(plan, result.handle, landed ? *landed : made, rows, scope);
  if (landed && made.x.data() != landed->x.data()) copy_received(plan, result.handle, *landed, made, scope);
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
  const DispatchOutputs made =
      outputs(arguments.x, arguments.x_scales, nullptr, handle.num_recv_rows, plan, call, scope);
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
