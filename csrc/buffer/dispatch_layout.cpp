#include "csrc/buffer/dispatch_layout.hpp"

#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

std::size_t work_bytes(const Runtime& runtime) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const auto experts = ranks * static_cast<std::size_t>(runtime.options().max_local_experts);
  return sizeof(LayoutWork) + sizeof(std::int32_t) * (ranks + experts + ranks);  // nodes are at most ranks
}

void check(const ConstTensorView& topk_idx, int num_experts, const Runtime& runtime) {
  const int num_ranks = runtime.num_ranks();
  check_tensor("topk_idx", topk_idx, runtime.device(), {DType::int32, DType::int64}, {kAnySize, kAnySize});
  check_token_count("number of tokens", topk_idx.size(0), num_ranks);
  check_range("width of topk_idx", topk_idx.size(1), 0, INT32_MAX);
  check_range("num_experts", num_experts, 1, std::int64_t{num_ranks} * runtime.options().max_local_experts);
  if (num_experts % num_ranks != 0) {
    fail<InvalidArgument>("num_experts is {}, it must be a multiple of the {} ranks", num_experts, num_ranks);
  }
}

LaunchShape plan_launch(const LayoutParams& params, const LaunchPolicy& policy) {
  const int threads = std::min(128, policy.warps_per_block * 32);
  return {std::clamp((params.num_tokens + threads - 1) / threads, 1, policy.multiprocessors), threads,
          LayoutShared(Carver::without_memory(), params.num_ranks, params.num_experts, params.num_nodes).bytes};
}

}  // namespace

DispatchLayouts::DispatchLayouts(Runtime& runtime)
    : runtime_(runtime), work_(runtime.zeroed_memory<LayoutWork>(work_bytes(runtime))) {}

DispatchLayout DispatchLayouts::count(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call) {
  check(topk_idx, num_experts, runtime_);
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  DispatchLayout layout = count(topk_idx, num_experts, runtime_.options().reject_unknown_experts, scope);
  scope.hand_out(layout.num_tokens_per_rank);  // they share their memory
  layout.event = scope.finish();
  return layout;
}

DispatchLayout DispatchLayouts::count(const ConstTensorView& topk_idx, int num_experts, bool report_unknown,
                                      const CallScope& scope) const {
  const Backend& executor = *runtime_.executor();
  const Device device = runtime_.device();

  LayoutParams params{};
  params.wait = runtime_.faults().wait_context();
  params.report_unknown_experts = report_unknown;
  params.topk_idx = {topk_idx.data, topk_idx.dtype == DType::int64};
  params.num_tokens = static_cast<int>(topk_idx.size(0));
  params.num_topk = static_cast<int>(topk_idx.size(1));
  params.num_experts = num_experts;
  params.num_ranks = runtime_.num_ranks();
  params.ranks_per_node = runtime_.nodes().ranks_of_each_node();
  params.num_nodes = params.ranks_per_node == 0 ? 0 : runtime_.nodes().num_nodes;
  params.work = work_.get();
  const LaunchShape shape = plan_launch(params, executor.policy());

  const std::vector wanted = {unplaced(device, DType::int32, {params.num_ranks}),
                              unplaced(device, DType::int32, {num_experts}),
                              unplaced(device, DType::int32, {params.num_nodes}),
                              unplaced(device, DType::boolean, {params.num_tokens, params.num_ranks})};
  const std::vector<Tensor> made = scope.result_tensors({&wanted, 1});
  params.num_tokens_per_rank = made[0].as<std::int32_t>();
  params.num_tokens_per_expert = made[1].as<std::int32_t>();
  params.num_tokens_per_node = made[2].as<std::int32_t>();
  params.is_token_in_rank = made[3].as<std::uint8_t>();
  executor.kernels().layout(params, shape, scope.stream());
  return {.num_tokens_per_rank = made[0],
          .num_tokens_per_expert = made[1],
          .num_tokens_per_node = params.num_nodes == 0 ? Tensor{} : made[2],
          .is_token_in_rank = made[3]};
}

}  // namespace deep_ep
