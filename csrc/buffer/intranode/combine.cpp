// combine: the sum of what the destination ranks hold for each token.
#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/implementation.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/intranode/combine_shared.hpp"

namespace deep_ep {
namespace {

// As many warps as have registers enough. About 32 pushing warps in all saturate NVLink; more get in each other's way
// (docs/measurements/).
constexpr int kGpuAddingWarps = 16;
constexpr int kGpuPushingWarps = 2;
constexpr int kGpuAddingWarpsPushing = kGpuAddingWarps - kGpuPushingWarps - 1;
constexpr int kGpuPushingWarpsInAll = 32;
constexpr int kPartsPerToken = 4;

void check_combine(const CombineArguments& arguments, const Device& device, int num_ranks) {
  if (arguments.handle == nullptr || !arguments.handle->destination_row.defined()) {
    throw InvalidArgument("handle is missing: combine needs the handle of the dispatch whose rows come back");
  }
  const DispatchHandle& handle = *arguments.handle;
  if (handle.destination_row.size(1) != num_ranks) {
    fail<InvalidArgument>("handle is of a buffer with {} ranks, this one has {}", handle.destination_row.size(1),
                          num_ranks);
  }
  const TensorView& x = arguments.x;
  check_tensor("x", x, device, {DType::bfloat16}, {handle.num_recv_rows, kAnySize});
  check_row_bytes("x", x);
  if (arguments.topk_weights) {
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32}, {handle.num_recv_rows, kAnySize});
    check_range("width of topk_weights", arguments.topk_weights->size(1), 1, 32);
  }
  if (arguments.bias_0) {
    check_tensor("bias_0", *arguments.bias_0, device, {DType::bfloat16}, {handle.num_tokens, x.size(1)});
    check_row_bytes("bias_0", *arguments.bias_0);
  }
  if (arguments.bias_1) {
    check_tensor("bias_1", *arguments.bias_1, device, {DType::bfloat16}, {handle.num_tokens, x.size(1)});
    check_row_bytes("bias_1", *arguments.bias_1);
  }
  check_range("config.num_sms", arguments.config.num_sms, 0, 4096);
  check_range("config.warps_per_block", arguments.config.warps_per_block, 0, 16);
}

}  // namespace

void Buffer::Implementation::place_window(CombineParams& params) const {
  const std::size_t weights = static_cast<std::size_t>(params.num_topk) * sizeof(float);
  params.window = window_;
  params.window_row_bytes = static_cast<std::uint32_t>((params.row_bytes + weights + kLine - 1) / kLine * kLine);
  const std::size_t fits =
      std::min<std::size_t>(window_bytes_ / (static_cast<std::size_t>(num_ranks_) * params.window_row_bytes),
                            static_cast<std::size_t>(control_.max_window_tokens));
  if (fits < kWindowRounds) {
    fail<OutOfMemory>(
        "the window of {} does not hold {} rows of {} from each of the {} ranks: raise heap_bytes or "
        "window_bytes",
        format_bytes(window_bytes_), kWindowRounds, format_bytes(params.window_row_bytes), num_ranks_);
  }
  if (fits >= static_cast<std::size_t>(params.num_tokens)) {
    params.window_tokens = params.tokens_per_round = std::max(1, params.num_tokens);
  } else {
    params.tokens_per_round = static_cast<int>(fits / kWindowRounds);
    params.window_tokens = kWindowRounds * params.tokens_per_round;
    check_range("rounds that the tokens take through the window (raise window_bytes)",
                params.num_tokens / params.tokens_per_round + 1, 1, kMostRounds);
  }
}

LaunchShape Buffer::Implementation::combine_shape(const Config& config, CombineParams& params) const {
  const LaunchPolicy& policy = executor_->policy();
  const bool gpu = executor_->device().kind == Device::Kind::cuda;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::combine_default(num_ranks_).num_sms;

  // Where this rank pushes, one warp raises flags, and the rest is shared out between adding and pushing.
  const int flag_warps = params.push ? 1 : 0;
  if (config.warps_per_block == 0 && gpu) {
    params.adding_warps = params.push ? kGpuAddingWarpsPushing : kGpuAddingWarps;
    params.pushing_warps = params.push ? kGpuPushingWarps : 0;
  } else {
    const int wanted = config.warps_per_block != 0 ? config.warps_per_block : policy.warps_per_block;
    const int rest = std::max(wanted - flag_warps, params.push ? 2 : 1);
    params.pushing_warps = params.push ? std::max(1, rest / 3) : 0;
    params.adding_warps = rest - params.pushing_warps;
  }
  params.parts_per_token = kPartsPerToken;
  params.pushing_blocks = gpu ? std::max(1, kGpuPushingWarpsInAll / std::max(1, params.pushing_warps)) : INT32_MAX;
  const int warps = params.adding_warps + params.pushing_warps + flag_warps;

  // Pushing warps stage whole rows where two fit, else pieces. Adding warps work in registers.
  if (params.push) {
    const auto align = [](std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; };
    const CombineShared empty{num_ranks_, params.pushing_warps, 8, 0};
    const std::size_t per_warp =
        (policy.max_shared_bytes - empty.bytes()) / static_cast<std::size_t>(params.pushing_warps);
    const std::size_t row = align(params.row_bytes);
    params.stages = static_cast<int>(std::clamp<std::size_t>(per_warp / row, 2, 8));
    params.stage_bytes = static_cast<std::uint32_t>(std::min(row, per_warp / 2 / kLine * kLine));
  }
  const CombineShared layout{num_ranks_, params.pushing_warps, params.stages, params.stage_bytes};
  return LaunchShape{std::min(sms, policy.multiprocessors), warps * 32, layout.bytes()};
}

CombineResult Buffer::Implementation::combine(const CombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments, executor_->device(), num_ranks_);
  require_one_node("combine");
  const DispatchHandle& handle = *arguments.handle;
  const TensorView& x = arguments.x;
  // A rank that received nothing has nothing to be read; frameworks give its empty tensors no address.
  const bool empty = x.size(0) == 0;
  const bool pullable = empty || (in_heap(x) && (!arguments.topk_weights || in_heap(*arguments.topk_weights)));
  if (arguments.mode == CombineMode::pull && !pullable) {
    throw InvalidArgument(
        "mode is pull but x or topk_weights does not lie in the symmetric heap: use received tensors, "
        "allocate_tensor, or another mode");
  }
  raise_faults();

  CombineParams params{};
  params.common = intranode_params();
  params.wait = wait_context();
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = arguments.topk_weights ? static_cast<int>(arguments.topk_weights->size(1)) : 0;
  place_window(params);
  begin(call);

  CombineResult result;
  result.combined_x = pool_tensor(DType::bfloat16, {handle.num_tokens, x.size(1)});
  if (arguments.topk_weights) {
    result.combined_topk_weights = pool_tensor(DType::float32, {handle.num_tokens, params.num_topk});
    params.combined_weights = result.combined_topk_weights->as<float>();
    if (!empty) params.topk_weights = arguments.topk_weights->as<const float>();
  }
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.recv_src_idx = handle.recv_src_idx.as<std::int32_t>();
  params.bias[0] = arguments.bias_0 ? arguments.bias_0->as<const std::byte>() : nullptr;
  params.bias[1] = arguments.bias_1 ? arguments.bias_1->as<const std::byte>() : nullptr;
  params.combined_x = result.combined_x.as<std::byte>();
  params.x = empty ? heap_->local() : x.as<const std::byte>();
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  params.push = arguments.mode == CombineMode::push || !pullable;
  const LaunchShape shape = combine_shape(arguments.config, params);
  executor_->kernels().combine(params, shape, run_stream_);

  use_on(call, result.combined_x);
  if (result.combined_topk_weights) use_on(call, *result.combined_topk_weights);
  result.event = finish(call);
  return result;
}

}  // namespace deep_ep
