// get_dispatch_layout: counts where tokens go.
#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/implementation.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/layout/params.hpp"

namespace deep_ep {

DispatchLayout Buffer::Implementation::get_dispatch_layout(const TensorView& topk_idx, int num_experts,
                                                           const CallOptions& call) {
  check_tensor("topk_idx", topk_idx, executor_->device(), {DType::int32, DType::int64}, {kAnySize, kAnySize});
  check_range("number of tokens", topk_idx.size(0), 0, INT32_MAX / std::max(2, num_ranks_));
  check_range("num_experts", num_experts, 1, std::int64_t{num_ranks_} * options_.max_local_experts);
  if (num_experts % num_ranks_ != 0) {
    fail<InvalidArgument>("num_experts is {}, it must be a multiple of the {} ranks", num_experts, num_ranks_);
  }
  raise_faults();
  begin(call);

  const auto num_tokens = static_cast<int>(topk_idx.size(0));
  const std::vector<Tensor> made =
      pool_tensors({unplaced(DType::int32, {num_ranks_}), unplaced(DType::int32, {num_experts}),
                    unplaced(DType::boolean, {num_tokens, num_ranks_})});
  DispatchLayout layout{
      .num_tokens_per_rank = made[0], .num_tokens_per_expert = made[1], .is_token_in_rank = made[2], .event = {}};

  LayoutParams params{};
  params.wait = wait_context();
  params.report_unknown_experts = options_.reject_unknown_experts;
  params.topk_idx = topk_idx.data;
  params.topk_idx_is_64_bit = topk_idx.dtype == DType::int64;
  params.num_tokens = num_tokens;
  params.num_topk = static_cast<int>(topk_idx.size(1));
  params.num_experts = num_experts;
  params.num_ranks = num_ranks_;
  params.work = layout_work_;
  params.num_tokens_per_rank = layout.num_tokens_per_rank.as<std::int32_t>();
  params.num_tokens_per_expert = layout.num_tokens_per_expert.as<std::int32_t>();
  params.is_token_in_rank = layout.is_token_in_rank.as<std::uint8_t>();

  const LaunchPolicy& policy = executor_->policy();
  const int threads = std::min(128, policy.warps_per_block * 32);
  const LaunchShape shape{std::clamp((num_tokens + threads - 1) / threads, 1, policy.multiprocessors), threads,
                          sizeof(std::int32_t) * static_cast<std::size_t>(num_ranks_ + num_experts)};
  executor_->kernels().layout(params, shape, run_stream_);

  use_on(call, layout.is_token_in_rank);  // the three share their memory
  layout.event = finish(call);
  return layout;
}

}  // namespace deep_ep
