// low_latency_combine: checks, the roles of warps, launch.
#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/implementation.hpp"
#include "csrc/buffer/low_latency/call_shape.hpp"
#include "csrc/buffer/low_latency/posters.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/low_latency/combine/shared.hpp"

namespace deep_ep {
namespace {

/// Warps that push a row together. On GPUs so many that each has all its loads under way at once; more where no block
/// has many rows.
constexpr int kGpuWarpsPerRow = 8;
constexpr int kGpuWarpsPerRowFew = 16;
constexpr int kHostWarpsPerRow = 2;

/// Rows of x that the handle knows of, and how they are laid out.
struct RowShape {
  std::int64_t blocks, rows;
};

RowShape row_shape(const LowLatencyHandle& handle, int num_ranks) {
  if (handle.layout == LowLatencyLayout::rank_major) return {num_ranks, handle.max_tokens};
  return {handle.num_experts / num_ranks, std::int64_t{num_ranks} * handle.max_tokens};
}

void check_handle(const LowLatencyHandle& handle, const Device& device, int num_ranks) {
  if (!handle.row_table.defined()) {
    throw InvalidArgument("handle is empty: low_latency_combine needs the handle of a low_latency_dispatch");
  }
  check_range("handle.max_tokens", handle.max_tokens, 1, kMostLowLatencyTokens);
  check_range("handle.num_topk", handle.num_topk, 1, kMaxTopk);
  if (handle.num_experts < 1 || handle.num_experts % num_ranks != 0) {
    fail<InvalidArgument>("handle.num_experts is {}, allowed: a multiple of the {} ranks", handle.num_experts,
                          num_ranks);
  }
  check_tensor("handle.row_table", handle.row_table.view(), device, {DType::int32},
               {1 + std::int64_t{handle.max_tokens} * (1 + handle.num_topk), num_ranks});
}

void check_alignment(const char* name, const TensorView& tensor) {
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0) {
    fail<InvalidArgument>("{} starts at an address that is not a multiple of 16", name);
  }
}

void check_arguments(const LowLatencyCombineArguments& arguments, const CallOptions& call, const Device& device,
                     int num_ranks) {
  if (call.async_finish && call.return_recv_hook) {
    throw InvalidArgument("async_finish and return_recv_hook exclude each other");
  }
  if (arguments.handle == nullptr) throw InvalidArgument("handle is missing");
  const LowLatencyHandle& handle = *arguments.handle;
  check_handle(handle, device, num_ranks);
  const RowShape shape = row_shape(handle, num_ranks);
  const TensorView& x = arguments.x;
  check_tensor("x", x, device, {DType::bfloat16}, {shape.blocks, shape.rows, kAnySize});
  if (x.size(2) <= 0 || x.size(2) % kScaleChannels != 0 || x.size(2) > INT32_MAX / 4) {
    fail<InvalidArgument>("x is {}, its hidden size must be a multiple of {}", x.describe(), kScaleChannels);
  }
  check_alignment("x", x);
  const TensorView& idx = arguments.topk_idx;
  check_tensor("topk_idx", idx, device, {DType::int32, DType::int64}, {kAnySize, handle.num_topk});
  check_range("number of tokens (rows of topk_idx)", idx.size(0), 0, handle.max_tokens);
  check_tensor("topk_weights", arguments.topk_weights, device, {DType::float32}, {idx.size(0), handle.num_topk});
  if (arguments.out) {
    check_tensor("out", *arguments.out, device, {DType::bfloat16}, {idx.size(0), x.size(2)});
    check_alignment("out", *arguments.out);
  }
  if (arguments.wait_recv_cost_stats) {
    check_tensor("wait_recv_cost_stats", *arguments.wait_recv_cost_stats, device, {DType::int64}, {num_ranks});
  }
  check_range("config.num_sms", arguments.config.num_sms, 0, 4096);
  check_range("config.warps_per_block", arguments.config.warps_per_block, 0, 32);
}

/// Warps of a row and grid, for the part of the call that `params.phase` says.
LaunchShape shape_of(LowLatencyCombineParams& params, const Config& config, const Executor& executor) {
  const LaunchPolicy& policy = executor.policy();
  const bool gpu = executor.device().kind == Device::Kind::cuda;
  const bool rdma = params.common.peers != nullptr;
  const int bf16_threads =
      rdma ? kernels::combine_low_latency_rdma::kMaxThreads : kernels::combine_low_latency::kMaxThreads;
  const int logfmt_threads =
      rdma ? kernels::combine_low_latency_logfmt_rdma::kMaxThreads : kernels::combine_low_latency_logfmt::kMaxThreads;
  const int most_threads = params.use_logfmt ? logfmt_threads : bf16_threads;
  // Memory for what posters gather is there for no more blocks than these make.
  const int least = rdma ? static_cast<int>(LowLatencyStaging::kLeastCombineWarps) : 1;
  const int most = std::max(std::min(most_threads, policy.max_block_threads) / 32, least);
  const int usual = gpu ? most : policy.warps_per_block;
  const int warps = std::clamp(config.warps_per_block != 0 ? config.warps_per_block : usual, least, most);
  const int sms = most_working_blocks(config, policy, poster_blocks(params.common, warps));
  const bool few = std::int64_t{params.common.num_ranks} * params.max_tokens <= sms;
  params.warps_per_row = std::min(warps, !gpu ? kHostWarpsPerRow : few ? kGpuWarpsPerRowFew : kGpuWarpsPerRow);
  const int groups = sends(params.phase) ? warps / params.warps_per_row : 0;

  // As many blocks as have anything to do.
  const std::int64_t to_push = rows_of_group(params.common.num_ranks, params.max_tokens, groups);
  const int blocks =
      static_cast<int>(std::clamp<std::int64_t>(std::max<std::int64_t>(to_push, params.num_tokens), 1, sms));
  const int rows = rows_of_group(params.common.num_ranks, params.max_tokens, groups * blocks);
  params.block_warps = warps;
  params.rows_of_group = rows;
  const int posters = poster_blocks(params.common, warps);
  const std::size_t shared_bytes =
      CombineShared(Carver::without_memory(), {params.hidden, params.use_logfmt}, warps, groups, params.warps_per_row,
                    rows, posters != 0 ? warps : 0)
          .bytes;
  if (shared_bytes > policy.max_shared_bytes) {
    fail<InvalidArgument>("hidden {} and max_tokens {} need {} of shared memory in a block, there are {}",
                          params.hidden, params.max_tokens, format_bytes(shared_bytes),
                          format_bytes(policy.max_shared_bytes));
  }
  params.common.working_blocks = blocks;
  return {blocks + posters, warps * 32, shared_bytes};
}

}  // namespace

LowLatencyCombineResult Buffer::Implementation::low_latency_combine(const LowLatencyCombineArguments& arguments,
                                                                    const CallOptions& call) {
  require_low_latency("low_latency_combine");
  check_arguments(arguments, call, executor_->device(), num_ranks_);
  look_after_low_latency();

  const LowLatencyHandle& handle = *arguments.handle;
  LowLatencyCombineParams params{};
  params.common = low_latency_params();
  params.max_tokens = handle.max_tokens;
  params.num_topk = handle.num_topk;
  params.hidden = static_cast<int>(arguments.x.size(2));
  params.num_local_experts = handle.num_experts / num_ranks_;
  params.rank_major = handle.layout == LowLatencyLayout::rank_major;
  params.use_logfmt = arguments.use_logfmt;
  params.row_bytes = CombineWire{params.hidden, params.use_logfmt}.bytes();
  if (!params.use_logfmt) {
    params.common.rail_width =
        choose_rails(call, params.max_tokens, params.num_topk, params.row_bytes, params.row_bytes);
  }
  params.call_shape = call_shape_of({params.max_tokens, params.num_topk, params.hidden, params.num_local_experts,
                                     params.use_logfmt ? 1 : 0, params.common.rail_width});
  params.x = arguments.x.as<const std::byte>();
  params.row_table = handle.row_table.as<const std::int32_t>();
  params.num_tokens = static_cast<int>(arguments.topk_idx.size(0));
  params.topk_idx = {arguments.topk_idx.data, arguments.topk_idx.dtype == DType::int64};
  params.topk_weights = arguments.topk_weights.as<const float>();
  if (arguments.wait_recv_cost_stats) params.wait_cost = arguments.wait_recv_cost_stats->as<std::int64_t>();
  check_low_latency_room(params.max_tokens, params.hidden, params.row_bytes);
  params.phase = LowLatencyPhase::both;
  shape_of(params, arguments.config, *executor_);  // whether the call fits is known before anything is enqueued
  // A call that receives at once comes behind those that wait for their hooks.
  if (call.return_recv_hook) {
    queue(LowLatencyKind::combine).require_room();
  } else {
    queue(LowLatencyKind::combine).receive_all();
  }

  begin(call);
  LowLatencyCombineResult result;
  if (arguments.out) {
    result.combined_x = Tensor(*arguments.out, nullptr);
  } else {
    result.combined_x = pool_tensor(DType::bfloat16, {params.num_tokens, params.hidden});
    use_on(call, result.combined_x);
  }
  params.combined_x = result.combined_x.as<std::byte>();

  // The launcher keeps what the kernels use until the receive part is in the stream.
  auto launch = [this, params, config = arguments.config, kept = result.combined_x, kept_table = handle.row_table](
                    LowLatencyPhase phase, StreamHandle stream) {
    LowLatencyCombineParams part = params;
    part.phase = phase;
    const LaunchShape shape = shape_of(part, config, *executor_);
    const KernelTable& kernels = executor_->kernels();
    const auto plain = part.use_logfmt ? kernels.combine_low_latency_logfmt : kernels.combine_low_latency;
    const auto rdma = part.use_logfmt ? kernels.combine_low_latency_logfmt_rdma : kernels.combine_low_latency_rdma;
    (part.common.peers == nullptr ? plain : rdma)(part, shape, stream);
  };
  enqueue_low_latency(LowLatencyKind::combine, call, std::move(launch), result.hook);
  result.event = finish(call);
  return result;
}

TensorView Buffer::Implementation::low_latency_combine_buffer(const LowLatencyHandle& handle) {
  require_low_latency("low_latency_combine_buffer");
  check_handle(handle, executor_->device(), num_ranks_);
  const RowShape shape = row_shape(handle, num_ranks_);
  TensorView view = unplaced(DType::bfloat16, {shape.blocks, shape.rows, handle.hidden});
  if (view.bytes() > combine_buffer_bytes_) {
    // The old memory stays until the buffer's end: views and recorded graphs may still name it.
    executor_->make_current();
    combine_buffer_ = static_cast<std::byte*>(own(executor_->allocate(view.bytes()), &Executor::free));
    combine_buffer_bytes_ = view.bytes();
  }
  view.data = combine_buffer_;
  return view;
}

}  // namespace deep_ep
