// low_latency_dispatch: room for what comes, launch.
#include <array>
#include <span>
#include <tuple>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/low_latency/low_latency.hpp"

namespace deep_ep {

LowLatencyDispatchResult LowLatency::dispatch(const LowLatencyDispatchArguments& arguments, const CallOptions& call) {
  check_end(arguments.return_recv_hook, call);
  check_dispatch(arguments, setup_);
  look_after_earlier_calls();
  LowLatencyDispatchPlan plan = plan_dispatch(arguments, setup_);
  make_way(LowLatencyKind::dispatch, arguments.return_recv_hook);

  // The rows by themselves, because they are large and often dropped early.
  CallScope scope(runtime_.calls(), call);
  const std::vector<Tensor> made = scope.result_tensors(std::array{plan.rows, plan.others}, plan.kept);
  const std::span rows(made.data(), plan.rows.size());
  const std::span others(rows.data() + rows.size(), plan.others.size());
  const std::span kept(others.data() + others.size(), plan.kept.size());
  LowLatencyDispatchParams& params = plan.params;
  LowLatencyDispatchResult result;
  result.recv_x = rows[0];
  params.recv_x = rows[0].as<std::byte>();
  if (rows.size() > 1) {
    result.recv_x_scales = rows[1];
    params.recv_scales = rows[1].as<std::byte>();
  }
  result.recv_count = others[0];
  params.recv_count = others[0].as<std::int32_t>();
  result.handle = {.src_info = kept[0],
                   .layout_range = kept[1],
                   .row_table = kept[2],
                   .num_tokens = params.num_tokens,
                   .max_tokens = params.max_tokens,
                   .num_topk = params.num_topk,
                   .num_experts = arguments.num_experts,
                   .hidden = params.hidden};
  params.src_info = kept[0].as<std::int32_t>();
  params.layout_range = kept[1].as<std::int64_t>();
  params.row_table = kept[2].as<std::int32_t>();
  if (setup_.measured) waits_->measure(plan);
  for (const Tensor* tensor : {&rows[0], &others[0], &kept[0]}) scope.hand_out(*tensor);

  result.event =
      launch(LowLatencyKind::dispatch, plan, scope, call.stream, std::tuple(made, arguments.owner), result.hook);
  if (too_many_tokens(arguments)) {
    if (result.hook) result.hook();
    check_range("number of tokens (rows of x)", arguments.x.size(0), 0, arguments.max_tokens);
  }
  return result;
}

}  // namespace deep_ep
