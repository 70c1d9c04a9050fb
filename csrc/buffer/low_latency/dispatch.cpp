// low_latency_dispatch: checks, room for what comes, launch.
#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/implementation.hpp"
#include "csrc/buffer/low_latency/call_shape.hpp"
#include "csrc/buffer/low_latency/posters.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/low_latency/dispatch/shared.hpp"

namespace deep_ep {
namespace {

LowLatencyFormat format_of(const LowLatencyDispatchArguments& arguments) {
  if (!arguments.use_fp8) return LowLatencyFormat::bf16;
  if (arguments.use_ue8m0) return LowLatencyFormat::fp8_ue8m0;
  return arguments.round_scale ? LowLatencyFormat::fp8_round_scale : LowLatencyFormat::fp8;
}

void check_arguments(const LowLatencyDispatchArguments& arguments, const CallOptions& call, const Device& device,
                     int num_ranks, int max_local_experts) {
  if (call.async_finish && call.return_recv_hook) {
    throw InvalidArgument("async_finish and return_recv_hook exclude each other");
  }
  if (arguments.use_ue8m0 && !(arguments.use_fp8 && arguments.round_scale)) {
    throw InvalidArgument("use_ue8m0 needs use_fp8 and round_scale: packed exponents hold powers of two only");
  }
  const TensorView& x = arguments.x;
  check_tensor("x", x, device, {DType::bfloat16}, {kAnySize, kAnySize});
  const int step = arguments.use_ue8m0 ? 4 * kScaleChannels : kScaleChannels;
  if (x.size(1) <= 0 || x.size(1) % step != 0 || x.size(1) > INT32_MAX / 4) {
    fail<InvalidArgument>("x is {}, its hidden size must be a multiple of {}", x.describe(), step);
  }
  if (reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0) {
    throw InvalidArgument("x starts at an address that is not a multiple of 16");
  }
  check_tensor("topk_idx", arguments.topk_idx, device, {DType::int32, DType::int64}, {x.size(0), kAnySize});
  check_range("width of topk_idx", arguments.topk_idx.size(1), 1,
              kMaxTopk);
  if (arguments.topk_weights) {
    if (arguments.layout != LowLatencyLayout::rank_major) {
      throw InvalidArgument("topk_weights travel in the rank_major layout only");
    }
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32},
                 {x.size(0), arguments.topk_idx.size(1)});
  }
  // Counts have 16 bits: of rows, and of a selection's place among the rows of its expert.
  check_range("max_tokens", arguments.max_tokens, 1, kMostLowLatencyTokens / arguments.topk_idx.size(1));
  check_range("number of tokens (rows of x)", x.size(0), 0, arguments.max_tokens);
  check_range("num_experts", arguments.num_experts, 1, 65535);
  if (arguments.num_experts % num_ranks != 0 || arguments.num_experts / num_ranks > max_local_experts) {
    fail<InvalidArgument>("num_experts is {}, allowed: a multiple of the {} ranks, at most {} a rank",
                          arguments.num_experts, num_ranks, max_local_experts);
  }
  const int num_local_experts = arguments.num_experts / num_ranks;
  check_range("rows of the output (local experts * ranks * max_tokens)",
              std::int64_t{num_local_experts} * num_ranks * arguments.max_tokens, 1, INT32_MAX);
  if (arguments.cumulative_local_expert_recv_stats) {
    check_tensor("cumulative_local_expert_recv_stats", *arguments.cumulative_local_expert_recv_stats, device,
                 {DType::int32}, {num_local_experts});
  }
  if (arguments.wait_recv_cost_stats) {
    check_tensor("wait_recv_cost_stats", *arguments.wait_recv_cost_stats, device, {DType::int64}, {num_ranks});
  }
  check_range("config.num_sms", arguments.config.num_sms, 0, 4096);
  check_range("config.warps_per_block", arguments.config.warps_per_block, 0, 32);
}

LowLatencyRow row_of(const LowLatencyDispatchParams& params) {
  const bool by_rails = params.common.rail_width != 0;
  return {params.hidden, params.num_topk, is_fp8(params.format), params.weights, by_rails};
}

/// Grid and shared memory of a part of the call.
LaunchShape shape_of(LowLatencyDispatchParams& params, const Config& config, const Executor& executor) {
  const LaunchPolicy& policy = executor.policy();
  const bool gpu = executor.device().kind == Device::Kind::cuda;
  const int most = std::max(1, std::min(kernels::dispatch_low_latency::kMaxThreads, policy.max_block_threads) / 32);
  const int usual = gpu ? most : policy.warps_per_block;
  const int warps = std::clamp(config.warps_per_block != 0 ? config.warps_per_block : usual, 1, most);
  const int posters = poster_blocks(params.common, warps);
  const int sms = most_working_blocks(config, policy, posters);
  const std::int64_t rows = std::int64_t{params.common.num_ranks} * params.max_tokens;
  params.warps_per_row = gpu && rows <= sms              ? warps  // no block has two
                         : warps % 4 == 0 && warps >= 16 ? 4
                         : warps % 2 == 0 && warps >= 8  ? 2
                                                         : 1;
  const std::int64_t to_send = sends(params.phase) ? std::int64_t{params.num_tokens} + 1 : 0;  // and the clerk
  const std::int64_t to_receive = receives(params.phase) ? rows : 0;  // few rows are best spread over many SMs
  const int blocks = static_cast<int>(std::clamp<std::int64_t>(std::max(to_send, to_receive), 1, sms));

  const std::size_t shared_bytes =
      DispatchShared(Carver::without_memory(), params.common.num_ranks,
                     params.num_local_experts * params.common.num_ranks,
                     sends(params.phase) ? row_of(params).stage_bytes() : 0, posters != 0 ? warps : 0)
          .bytes;
  if (shared_bytes > policy.max_shared_bytes) {
    fail<InvalidArgument>("hidden {} and num_experts {} need {} of shared memory in a block, there are {}",
                          params.hidden, params.num_local_experts * params.common.num_ranks, format_bytes(shared_bytes),
                          format_bytes(policy.max_shared_bytes));
  }
  params.common.working_blocks = blocks;
  return {blocks + posters, warps * 32, shared_bytes};
}

/// A tensor whose last two dimensions are those of `contiguous`, exchanged.
Tensor transposed(const Tensor& contiguous) {
  TensorView view = contiguous.view();
  std::swap(view.shape[1], view.shape[2]);
  std::swap(view.strides[1], view.strides[2]);
  return {view, contiguous.storage()};
}

}  // namespace

LowLatencyDispatchResult Buffer::Implementation::low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                                      const CallOptions& call) {
  require_low_latency("low_latency_dispatch");
  check_arguments(arguments, call, executor_->device(), num_ranks_, options_.max_local_experts);
  look_after_low_latency();

  LowLatencyDispatchParams params{};
  params.common = low_latency_params();
  params.max_tokens = arguments.max_tokens;
  params.num_topk = static_cast<int>(arguments.topk_idx.size(1));
  params.hidden = static_cast<int>(arguments.x.size(1));
  params.num_local_experts = arguments.num_experts / num_ranks_;
  params.count_cells = 1 + (params.num_local_experts + 1) / 2;
  params.format = format_of(arguments);
  params.rank_major = arguments.layout == LowLatencyLayout::rank_major;
  params.weights = arguments.topk_weights.has_value();
  LowLatencyRow by_rails = row_of(params);
  by_rails.by_rails = true;
  params.common.rail_width =
      choose_rails(call, params.max_tokens, params.num_topk, row_of(params).bytes(), by_rails.bytes());
  params.call_shape =
      call_shape_of({params.max_tokens, params.num_topk, params.hidden, params.num_local_experts,
                     is_fp8(params.format) ? 1 : 0, params.weights ? 1 : 0, params.common.rail_width});
  params.num_tokens = static_cast<int>(arguments.x.size(0));
  params.x = arguments.x.as<const std::byte>();
  params.topk_idx = {arguments.topk_idx.data, arguments.topk_idx.dtype == DType::int64};
  params.report_unknown_experts = options_.reject_unknown_experts;
  if (params.weights) params.topk_weights = arguments.topk_weights->as<const float>();
  if (arguments.cumulative_local_expert_recv_stats) {
    params.recv_stats = arguments.cumulative_local_expert_recv_stats->as<std::int32_t>();
  }
  if (arguments.wait_recv_cost_stats) params.wait_cost = arguments.wait_recv_cost_stats->as<std::int64_t>();
  check_low_latency_room(params.max_tokens, params.hidden, row_of(params).bytes());
  params.phase = LowLatencyPhase::both;
  shape_of(params, arguments.config, *executor_);  // whether the call fits is known before anything is enqueued
  // A call that receives at once comes behind those that wait for their hooks.
  if (call.return_recv_hook) {
    queue(LowLatencyKind::dispatch).require_room();
  } else {
    queue(LowLatencyKind::dispatch).receive_all();
  }

  // Outputs: the rows by themselves, as they are large and often dropped early.
  begin(call);
  const bool fp8 = is_fp8(params.format);
  const std::int64_t blocks = params.recv_blocks();
  const std::int64_t rows = params.rank_major ? params.max_tokens : std::int64_t{num_ranks_} * params.max_tokens;
  std::vector<TensorView> of_rows = {
      unplaced(fp8 ? DType::float8_e4m3 : DType::bfloat16, {blocks, rows, params.hidden})};
  if (fp8) {
    const ScaleLayout scales = params.scale_layout();
    of_rows.push_back(unplaced(scales.packed ? DType::int32 : DType::float32, {blocks, scales.columns(), rows}));
  }
  const std::int64_t table_rows = 1 + std::int64_t{params.max_tokens} * (1 + params.num_topk);
  std::vector<TensorView> others = {
      unplaced(DType::int32, {blocks}), unplaced(DType::int32, {blocks, rows}),
      params.rank_major ? unplaced(DType::int64, {num_ranks_}) : unplaced(DType::int64, {blocks, num_ranks_}),
      unplaced(DType::int32, {table_rows, num_ranks_})};
  if (params.rank_major) others.push_back(unplaced(DType::int32, {blocks, rows, params.num_topk}));
  if (params.weights) others.push_back(unplaced(DType::float32, {blocks, rows, params.num_topk}));
  const std::vector<Tensor> made_rows = pool_tensors(std::move(of_rows));
  const std::vector<Tensor> made = pool_tensors(std::move(others));

  LowLatencyDispatchResult result;
  result.recv_x = made_rows[0];
  params.recv_x = made_rows[0].as<std::byte>();
  if (fp8) {
    result.recv_x_scales = transposed(made_rows[1]);
    params.recv_scales = made_rows[1].as<std::byte>();
  }
  result.recv_count = made[0];
  params.recv_count = made[0].as<std::int32_t>();
  result.handle = {.src_info = made[1],
                   .layout_range = made[2],
                   .row_table = made[3],
                   .layout = arguments.layout,
                   .max_tokens = params.max_tokens,
                   .num_topk = params.num_topk,
                   .num_experts = arguments.num_experts,
                   .hidden = params.hidden};
  params.src_info = made[1].as<std::int32_t>();
  params.layout_range = made[2].as<std::int64_t>();
  params.row_table = made[3].as<std::int32_t>();
  if (params.rank_major) {
    result.recv_topk_idx = made[4];
    params.recv_topk_idx = made[4].as<std::int32_t>();
  }
  if (params.weights) {
    result.recv_topk_weights = made[5];
    params.recv_topk_weights = made[5].as<float>();
  }

  // The launcher keeps the outputs until the receive part is in the stream.
  auto launch = [this, params, config = arguments.config, kept_rows = made_rows[0], kept = made[0]](
                    LowLatencyPhase phase, StreamHandle stream) {
    LowLatencyDispatchParams part = params;
    part.phase = phase;
    const LaunchShape shape = shape_of(part, config, *executor_);
    const KernelTable& kernels = executor_->kernels();
    const bool rdma = part.common.peers != nullptr;
    (rdma ? kernels.dispatch_low_latency_rdma : kernels.dispatch_low_latency)(part, shape, stream);
  };
  use_on(call, made_rows[0]);
  use_on(call, made[0]);
  enqueue_low_latency(LowLatencyKind::dispatch, call, std::move(launch), result.hook);
  result.event = finish(call);
  return result;
}

}  // namespace deep_ep
