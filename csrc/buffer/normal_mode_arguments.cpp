#include "csrc/buffer/normal_mode_arguments.hpp"

#include "csrc/buffer/checks.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

constexpr std::int64_t kProtocolVersion = 2;

void check_layout(const DispatchArguments& arguments, const NormalModeSetup& setup) {
  const std::int64_t tokens = arguments.x.size(0);
  const auto given = [](const char* name, const ConstTensorView& tensor) {
    if (tensor.dims == 0) fail<InvalidArgument>("{} is missing: dispatch needs the layout", name);
  };
  given("num_tokens_per_rank", arguments.num_tokens_per_rank);
  given("is_token_in_rank", arguments.is_token_in_rank);
  given("num_tokens_per_expert", arguments.num_tokens_per_expert);
  check_tensor("num_tokens_per_rank", arguments.num_tokens_per_rank, setup.device, {DType::int32}, {setup.num_ranks});
  check_tensor("is_token_in_rank", arguments.is_token_in_rank, setup.device, {DType::boolean, DType::uint8},
               {tokens, setup.num_ranks});
  check_tensor("num_tokens_per_expert", arguments.num_tokens_per_expert, setup.device, {DType::int32}, {kAnySize});
  const std::int64_t experts = num_experts(arguments);
  if (experts == 0 || experts % setup.num_ranks != 0 || experts / setup.num_ranks > setup.max_local_experts) {
    fail<InvalidArgument>(
        "num_tokens_per_expert counts {} experts, allowed: a multiple of the {} ranks, at most {} a rank", experts,
        setup.num_ranks, setup.max_local_experts);
  }
  if (arguments.topk_weights && !arguments.topk_idx) {
    throw InvalidArgument("topk_weights is given, allowed: only with topk_idx, which is missing");
  }
  if (arguments.topk_idx) check_selections(*arguments.topk_idx, arguments.topk_weights, tokens, setup);
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("num_worst_tokens", arguments.num_worst_tokens, 0, INT32_MAX);
}

bool is_missing(const DispatchHandle* handle) { return handle == nullptr || !handle->destination_row.defined(); }

void check_ranks(const DispatchHandle& handle, const NormalModeSetup& setup) {
  if (handle.destination_row.size(1) == setup.num_ranks) return;
  fail<InvalidArgument>("handle is of a buffer with {} ranks, this one has {}", handle.destination_row.size(1),
                        setup.num_ranks);
}

std::int64_t row_bytes(const ConstTensorView& rows) {
  return rows.size(1) * static_cast<std::int64_t>(size_of(rows.dtype));
}

}  // namespace

void check_sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales, const Config& config,
                     const NormalModeSetup& setup) {
  check_tensor("x", x, setup.device, {}, {kAnySize, kAnySize});
  check_row_bytes("x", x);
  check_token_count("number of tokens", x.size(0), setup.num_ranks);
  if (x_scales) {
    check_strided_tensor("x_scales", *x_scales, setup.device, {DType::float32, DType::int32}, {x.size(0), kAnySize});
    check_range("width of x_scales", x_scales->size(1), 0, INT32_MAX / 4);
  }
  check_config(config, kernels::dispatch::kMaxThreads / 32);
}

void check_selections(const ConstTensorView& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                      std::int64_t tokens, const NormalModeSetup& setup) {
  check_tensor("topk_idx", topk_idx, setup.device, {DType::int32, DType::int64}, {tokens, kAnySize});
  check_range("width of topk_idx", topk_idx.size(1), 1, kMaxTopk);
  if (topk_weights) {
    check_tensor("topk_weights", *topk_weights, setup.device, {DType::float32}, {tokens, topk_idx.size(1)});
  }
}

void check_dispatch(const DispatchArguments& arguments, const NormalModeSetup& setup) {
  check_sent_rows(arguments.x, arguments.x_scales, arguments.config, setup);
  check_layout(arguments, setup);
}

void check_dispatch(const CachedDispatchArguments& arguments, const NormalModeSetup& setup) {
  check_sent_rows(arguments.x, arguments.x_scales, arguments.config, setup);
  if (is_missing(arguments.handle)) {
    throw InvalidArgument("handle is missing: cached_dispatch needs the handle of an earlier dispatch");
  }
  const DispatchHandle& handle = *arguments.handle;
  check_ranks(handle, setup);
  if (handle.num_tokens != arguments.x.size(0)) {
    fail<InvalidArgument>("x has {} rows, the handle's dispatch had {}", arguments.x.size(0), handle.num_tokens);
  }
}

void check_combine(const CombineArguments& arguments, const NormalModeSetup& setup) {
  if (is_missing(arguments.handle)) {
    throw InvalidArgument("handle is missing: combine needs the handle of the dispatch whose rows come back");
  }
  const DispatchHandle& handle = *arguments.handle;
  check_ranks(handle, setup);
  check_tensor("handle.rank_prefix_matrix", handle.rank_prefix_matrix.view(), setup.device, {DType::int32},
               {setup.num_ranks, setup.num_ranks});
  const ConstTensorView& x = arguments.x;
  check_tensor("x", x, setup.device, {DType::bfloat16}, {handle.num_recv_rows, kAnySize});
  check_row_bytes("x", x);
  if (arguments.topk_weights) {
    check_tensor("topk_weights", *arguments.topk_weights, setup.device, {DType::float32},
                 {handle.num_recv_rows, kAnySize});
    check_range("width of topk_weights", arguments.topk_weights->size(1), 1, kMaxTopk);
  }
  const auto check_bias = [&](const char* name, const std::optional<ConstTensorView>& bias) {
    if (!bias) return;
    check_tensor(name, *bias, setup.device, {DType::bfloat16}, {handle.num_tokens, x.size(1)});
    check_row_bytes(name, *bias);
  };
  check_bias("bias_0", arguments.bias_0);
  check_bias("bias_1", arguments.bias_1);
  check_config(arguments.config, kernels::combine::kMaxThreads / 32);
}

NotifyCall notify_call(const DispatchArguments& arguments, const NormalModeSetup& setup) {
  NotifyCall call{};
  call.shape =
      call_shape(arguments.x, arguments.x_scales, arguments.topk_idx, arguments.topk_weights, num_experts(arguments));
  call.num_tokens = static_cast<int>(arguments.x.size(0));
  call.num_local_experts = num_experts(arguments) / setup.num_ranks;
  call.expert_alignment = arguments.expert_alignment;
  call.is_token_in_rank = arguments.is_token_in_rank.as<std::uint8_t>();
  call.num_tokens_per_rank = arguments.num_tokens_per_rank.as<std::int32_t>();
  call.num_tokens_per_expert = arguments.num_tokens_per_expert.as<std::int32_t>();
  call.refuse_unknown_experts = setup.reject_unknown_experts;
  return call;
}

CallShape call_shape(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                     const std::optional<ConstTensorView>& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                     int num_experts) {
  return {{row_bytes(x), x_scales ? row_bytes(*x_scales) : 0, topk_idx ? topk_idx->size(1) : 0,
           topk_idx ? static_cast<std::int64_t>(size_of(topk_idx->dtype)) : 0, num_experts,
           static_cast<std::int64_t>(x.dtype), x_scales ? static_cast<std::int64_t>(x_scales->dtype) : 0,
           kProtocolVersion, topk_weights ? 1 : 0}};
}

SentRows sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales) {
  SentRows params{};
  params.num_tokens = static_cast<int>(x.size(0));
  params.x = x.as<std::byte>();
  params.rows.row_bytes = static_cast<std::uint32_t>(row_bytes(x));
  if (x_scales) {
    params.rows.num_scales = static_cast<int>(x_scales->size(1));
    params.scales = {x_scales->as<std::uint32_t>(), x_scales->stride(0), x_scales->stride(1)};
  }
  return params;
}

SentRows sent_rows(const DispatchArguments& arguments, const NormalModeSetup& setup) {
  SentRows params = sent_rows(arguments.x, arguments.x_scales);
  if (arguments.topk_idx) {
    params.topk_idx = {arguments.topk_idx->data, arguments.topk_idx->dtype == DType::int64};
    if (arguments.topk_weights) params.topk_weights = arguments.topk_weights->as<float>();
    params.rows.num_topk = static_cast<int>(arguments.topk_idx->size(1));
    params.rows.topk_idx_is_64_bit = params.topk_idx.is_64_bit;
  }
  params.num_local_experts = num_experts(arguments) / setup.num_ranks;
  params.send_src_idx = true;
  params.fill_tail = arguments.num_worst_tokens > 0 && arguments.topk_idx.has_value();
  return params;
}

SentRows sent_rows(const CachedDispatchArguments& arguments, const NormalModeSetup& setup) {
  SentRows params = sent_rows(arguments.x, arguments.x_scales);
  params.num_local_experts = arguments.handle->num_experts / setup.num_ranks;
  return params;
}

}  // namespace deep_ep
