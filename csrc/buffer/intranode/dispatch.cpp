// dispatch: exchange counts (unless a handle knows them), make room, send.
#include <algorithm>
#include <thread>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/implementation.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "kernels/intranode/dispatch_shared.hpp"

namespace deep_ep {
namespace {

constexpr int kMaxTopk = 32;  // a warp's lanes hold a token's selections
constexpr std::int64_t kProtocolVersion = 1;
constexpr std::size_t kNotifySharedBytes = 256;
constexpr int kNotifyThreads = 768;  // as many as have registers enough

/// All arguments but those that need the buffer's state.
void check_dispatch(const DispatchArguments& arguments, const Device& device, int num_ranks, int max_local_experts) {
  const TensorView& x = arguments.x;
  check_tensor("x", x, device, {}, {kAnySize, kAnySize});
  check_row_bytes("x", x);
  check_range("number of tokens", x.size(0), 0, INT32_MAX / std::max(2, num_ranks));
  if (arguments.x_scales) {
    check_strided_tensor("x_scales", *arguments.x_scales, device, {DType::float32, DType::int32},
                         {x.size(0), kAnySize});
  }
  check_range("config.num_sms", arguments.config.num_sms, 0, 4096);
  check_range("config.warps_per_block", arguments.config.warps_per_block, 0, 16);

  if (arguments.handle != nullptr) {
    if (arguments.topk_idx || arguments.topk_weights) {
      throw InvalidArgument(
          "topk_idx and topk_weights cannot be given together with handle: a cached dispatch moves x only");
    }
    const DispatchHandle& handle = *arguments.handle;
    if (!handle.destination_row.defined()) throw InvalidArgument("handle is empty: it must come from a dispatch");
    if (handle.destination_row.size(1) != num_ranks) {
      fail<InvalidArgument>("handle is of a buffer with {} ranks, this one has {}", handle.destination_row.size(1),
                            num_ranks);
    }
    if (handle.num_tokens != x.size(0)) {
      fail<InvalidArgument>("x has {} rows, the handle's dispatch had {}", x.size(0), handle.num_tokens);
    }
    return;
  }

  const auto given = [](const char* name, const std::optional<TensorView>& tensor) {
    if (!tensor) fail<InvalidArgument>("{} is missing: without a handle, dispatch needs the layout", name);
  };
  given("num_tokens_per_rank", arguments.num_tokens_per_rank);
  given("is_token_in_rank", arguments.is_token_in_rank);
  given("num_tokens_per_expert", arguments.num_tokens_per_expert);
  check_tensor("num_tokens_per_rank", *arguments.num_tokens_per_rank, device, {DType::int32}, {num_ranks});
  check_tensor("is_token_in_rank", *arguments.is_token_in_rank, device, {DType::boolean, DType::uint8},
               {x.size(0), num_ranks});
  check_tensor("num_tokens_per_expert", *arguments.num_tokens_per_expert, device, {DType::int32}, {kAnySize});
  const std::int64_t num_experts = arguments.num_tokens_per_expert->size(0);
  if (num_experts == 0 || num_experts % num_ranks != 0 || num_experts / num_ranks > max_local_experts) {
    fail<InvalidArgument>(
        "num_tokens_per_expert counts {} experts, allowed: a multiple of the {} ranks, at most {} a rank", num_experts,
        num_ranks, max_local_experts);
  }
  if (arguments.topk_idx.has_value() != arguments.topk_weights.has_value()) {
    throw InvalidArgument("topk_idx and topk_weights come together: one of them is missing");
  }
  if (arguments.topk_idx) {
    check_tensor("topk_idx", *arguments.topk_idx, device, {DType::int32, DType::int64}, {x.size(0), kAnySize});
    check_range("width of topk_idx", arguments.topk_idx->size(1), 1, kMaxTopk);
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32},
                 {x.size(0), arguments.topk_idx->size(1)});
  }
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("num_worst_tokens", arguments.num_worst_tokens, 0, INT32_MAX);
}

std::int64_t scale_bytes(const DispatchArguments& arguments) {
  return arguments.x_scales ? arguments.x_scales->size(1) * 4 : 0;
}

}  // namespace

/// Tensors that a dispatch returns, and how peers reach them.
struct Buffer::Implementation::Outputs {
  Tensor x, scales, topk_idx, topk_weights, src_idx;  // undefined: not wanted
  bool in_heap = true;

  static RowTargets targets(const Outputs& outputs) {
    return RowTargets{outputs.x.as<std::byte>(), outputs.scales.as<std::byte>(), outputs.topk_idx.as<std::byte>(),
                      outputs.topk_weights.as<float>(), outputs.src_idx.as<std::int32_t>()};
  }
};

DispatchHandle Buffer::Implementation::notify(const DispatchArguments& arguments, std::vector<int>& tokens_per_expert) {
  DispatchHandle handle;
  handle.num_tokens = arguments.x.size(0);
  handle.num_experts = static_cast<int>(arguments.num_tokens_per_expert->size(0));
  handle.num_topk = arguments.topk_idx ? static_cast<int>(arguments.topk_idx->size(1)) : 0;
  const std::vector<Tensor> tables = pool_tensors(
      {unplaced(DType::int32, {num_ranks_, num_ranks_}), unplaced(DType::int32, {handle.num_tokens, num_ranks_})});
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];

  const bool exact = arguments.num_worst_tokens == 0;
  const int local_experts = handle.num_experts / num_ranks_;
  NotifyParams params{};
  params.common = intranode_params();
  params.wait = wait_context();
  params.shape = CallShape{
      {arguments.x.size(1) * static_cast<std::int64_t>(size_of(arguments.x.dtype)), scale_bytes(arguments),
       handle.num_topk, arguments.topk_idx ? static_cast<std::int64_t>(size_of(arguments.topk_idx->dtype)) : 0,
       handle.num_experts, static_cast<std::int64_t>(arguments.x.dtype),
       arguments.x_scales ? static_cast<std::int64_t>(arguments.x_scales->dtype) : 0, kProtocolVersion}};
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.num_local_experts = local_experts;
  params.expert_alignment = arguments.expert_alignment;
  params.is_token_in_rank = arguments.is_token_in_rank->as<std::uint8_t>();
  params.num_tokens_per_rank = arguments.num_tokens_per_rank->as<std::int32_t>();
  params.num_tokens_per_expert = arguments.num_tokens_per_expert->as<std::int32_t>();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.host_counts = exact ? host_counts_ : nullptr;

  const bool gpu = executor_->device().kind == Device::Kind::cuda;
  const int threads = gpu ? kNotifyThreads : executor_->policy().warps_per_block * 32;
  if (exact) __atomic_store_n(&host_counts_->epoch, 0, __ATOMIC_RELEASE);
  const int blocks = std::min(num_ranks_, executor_->policy().multiprocessors);
  executor_->kernels().notify(params, LaunchShape{blocks, threads, kNotifySharedBytes}, run_stream_);

  if (exact) {
    wait_for_counts();
    handle.num_recv_rows = host_counts_->num_recv_tokens;
    tokens_per_expert.assign(host_counts_->tokens_per_expert, host_counts_->tokens_per_expert + local_experts);
  } else {
    handle.num_recv_rows = arguments.num_worst_tokens;
  }
  return handle;
}

void Buffer::Implementation::wait_for_counts() {
  // The kernel has the deadline proper, and says whom it waited for. Ours is for a kernel that never started.
  const Deadline deadline(timeout_s_ == 0 ? 0 : timeout_s_ * 2 + 10);
  for (int spins = 1; __atomic_load_n(&host_counts_->epoch, __ATOMIC_ACQUIRE) == 0; ++spins) {
    if (spins % 64 != 0) continue;
    if (met_fault()) break;
    if (spins % 4096 == 0) {
      if (executor_->device().kind == Device::Kind::cpu) std::this_thread::yield();
      if (deadline.expired()) {
        break_down(
            fmt::format("rank {}: the counts of a dispatch did not come within {} s, and no kernel says why: "
                        "earlier work on the stream has not ended, or the GPU is lost",
                        rank_, deadline.seconds()));
      }
    }
  }
  // Notes wait for the next call: the counts are exchanged, and the peers expect our rows.
  if (!met_fault()) return;
  abandon_call();
  raise_faults();
}

Buffer::Implementation::Outputs Buffer::Implementation::allocate_outputs(const DispatchArguments& arguments,
                                                                         const DispatchHandle& handle) {
  // The rows by themselves, as they are large and often dropped early; so is what a handle keeps, which lives long. The
  // others share one piece of memory.
  const std::int64_t rows = handle.num_recv_rows;
  Outputs outputs;
  const TensorView x = unplaced(arguments.x.dtype, {rows, arguments.x.size(1)});
  std::vector<Tensor*> others;
  std::vector<TensorView> wanted;
  const auto want = [&](Tensor& tensor, const TensorView& view) {
    others.push_back(&tensor);
    wanted.push_back(view);
  };
  if (arguments.x_scales) {
    want(outputs.scales, unplaced(arguments.x_scales->dtype, {rows, arguments.x_scales->size(1)}));
  }
  if (arguments.topk_idx) {
    want(outputs.topk_idx, unplaced(arguments.topk_idx->dtype, {rows, arguments.topk_idx->size(1)}));
    want(outputs.topk_weights, unplaced(DType::float32, {rows, arguments.topk_idx->size(1)}));
  }
  const bool kept = arguments.handle == nullptr;
  const TensorView src_idx = unplaced(DType::int32, {rows});

  using Made = std::optional<std::vector<Tensor>>;
  Made made_x = try_heap_tensors({x});
  Made made_others = !made_x || wanted.empty() ? Made() : try_heap_tensors(wanted);
  Made made_src_idx = !made_x || !kept ? Made() : try_heap_tensors({src_idx});
  outputs.in_heap = made_x && (made_others || wanted.empty()) && (made_src_idx || !kept);
  if (!outputs.in_heap) {
    made_x = pool_tensors({x});
    if (!wanted.empty()) made_others = pool_tensors(wanted);
    if (kept) made_src_idx = pool_tensors({src_idx});
  }
  outputs.x = made_x->front();
  if (kept) outputs.src_idx = made_src_idx->front();
  for (std::size_t i = 0; i < others.size(); ++i) *others[i] = (*made_others)[i];
  return outputs;
}

LaunchShape Buffer::Implementation::dispatch_shape(const Config& config, DispatchParams& params) const {
  const LaunchPolicy& policy = executor_->policy();
  const int warps = config.warps_per_block != 0 ? config.warps_per_block : policy.warps_per_block;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::dispatch_default(num_ranks_).num_sms;
  const int useful = std::max(1, (params.num_tokens + warps - 1) / warps);

  // As many stages as fit, at least two; rows too long for two are cut into pieces.
  const DispatchShared without_stages{num_ranks_, warps, 8, 0};
  const std::size_t per_warp = (policy.max_shared_bytes - without_stages.bytes()) / static_cast<std::size_t>(warps);
  const std::size_t row = align_to_line(params.row_bytes);
  params.stages = static_cast<int>(std::clamp<std::size_t>(per_warp / row, 2, 8));
  params.stage_bytes = static_cast<std::uint32_t>(std::min(row, per_warp / 2 / kLine * kLine));
  const DispatchShared layout{num_ranks_, warps, params.stages, params.stage_bytes};
  return LaunchShape{std::min({sms, policy.multiprocessors, useful}), warps * 32, layout.bytes()};
}

DispatchResult Buffer::Implementation::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, executor_->device(), num_ranks_, options_.max_local_experts);
  require_one_node("dispatch");
  raise_faults();
  begin(call);
  try {
    return dispatch_rows(arguments, call);
  } catch (...) {
    abandon_call();  // its first kernel may be under way
    throw;
  }
}

DispatchResult Buffer::Implementation::dispatch_rows(const DispatchArguments& arguments, const CallOptions& call) {
  if (recording_ && arguments.handle == nullptr && arguments.num_worst_tokens == 0) {
    throw InvalidArgument(
        "num_worst_tokens is 0 and there is no handle, but the stream records a CUDA graph: the host "
        "cannot wait for sizes then");
  }

  // 1. Who gets what? Known from the handle, or exchanged.
  DispatchResult result;
  const bool cached = arguments.handle != nullptr;
  result.handle = cached ? *arguments.handle : notify(arguments, result.num_recv_tokens_per_expert);
  DispatchHandle& handle = result.handle;

  // 2. Room for it: in the heap, where peers write the rows into place, or else behind the window.
  const Outputs outputs = allocate_outputs(arguments, handle);
  if (!cached) handle.recv_src_idx = outputs.src_idx;

  // 3. Send.
  DispatchParams params{};
  params.common = intranode_params();
  params.wait = wait_context();
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.x = arguments.x.as<const std::byte>();
  params.row_bytes =
      static_cast<std::uint32_t>(arguments.x.size(1) * static_cast<std::int64_t>(size_of(arguments.x.dtype)));
  if (arguments.x_scales) {
    params.scales = arguments.x_scales->as<const std::uint32_t>();
    params.num_scales = static_cast<int>(arguments.x_scales->size(1));
    params.scale_token_stride = arguments.x_scales->stride(0);
    params.scale_stride = arguments.x_scales->stride(1);
  }
  if (arguments.topk_idx) {
    params.topk_idx = arguments.topk_idx->data;
    params.topk_weights = arguments.topk_weights->as<const float>();
    params.num_topk = handle.num_topk;
    params.topk_idx_is_64_bit = arguments.topk_idx->dtype == DType::int64;
  }
  params.num_local_experts = handle.num_experts / num_ranks_;
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.send_src_idx = !cached;
  params.output = Outputs::targets(outputs);
  params.output_rows = handle.num_recv_rows;
  params.fill_tail = !cached && arguments.num_worst_tokens > 0 && arguments.topk_idx.has_value();
  if (!outputs.in_heap) place_window(arguments, params);
  const LaunchShape shape = dispatch_shape(arguments.config, params);
  executor_->kernels().dispatch(params, shape, run_stream_);

  // 4. Hand out.
  result.recv_x = outputs.x;
  if (arguments.x_scales) result.recv_x_scales = outputs.scales;
  if (arguments.topk_idx) {
    result.recv_topk_idx = outputs.topk_idx;
    result.recv_topk_weights = outputs.topk_weights;
  }
  const Tensor* const used[] = {
      &outputs.x,       &outputs.scales,         &outputs.topk_idx,         &outputs.topk_weights,
      &outputs.src_idx, &handle.destination_row, &handle.rank_prefix_matrix};
  for (const Tensor* tensor : used) use_on(call, *tensor);
  result.event = finish(call);
  return result;
}

void Buffer::Implementation::place_window(const DispatchArguments& arguments, DispatchParams& params) const {
  const auto idx_bytes = static_cast<std::size_t>(params.num_topk) * (params.topk_idx_is_64_bit ? 8 : 4);
  const auto weight_bytes = static_cast<std::size_t>(params.num_topk) * 4;
  const auto scale_row = static_cast<std::size_t>(scale_bytes(arguments));
  const std::size_t row = params.row_bytes + scale_row + idx_bytes + weight_bytes + sizeof(std::int32_t);
  const auto ranks = static_cast<std::size_t>(num_ranks_);
  const std::size_t usable = window_bytes_ - std::min(window_bytes_, 5 * kLine);
  const std::size_t rows = usable / (row * ranks);
  if (rows == 0) {
    fail<OutOfMemory>(
        "a heap of {} cannot hold the {} rows of this dispatch, and its window of {} not one row of {} "
        "from each of the {} ranks: raise heap_bytes or window_bytes",
        format_bytes(heap_->bytes()), params.output_rows, format_bytes(window_bytes_), format_bytes(row), num_ranks_);
  }
  params.window_rows = static_cast<std::uint32_t>(std::min<std::size_t>(rows, INT32_MAX / ranks));
  check_range("rounds that the rows take through the window (raise window_bytes)",
              params.output_rows / params.window_rows + 1, 1, kMostRounds);
  const std::size_t all_rows = ranks * params.window_rows;
  std::byte* at = window_;
  const auto take = [&](std::size_t bytes_per_row) {
    std::byte* part = at;
    at += align_to_line(all_rows * bytes_per_row);
    return part;
  };
  params.window.x = take(params.row_bytes);
  params.window.scales = take(scale_row);
  params.window.topk_idx = take(idx_bytes);
  params.window.topk_weights = reinterpret_cast<float*>(take(weight_bytes));
  params.window.src_idx = reinterpret_cast<std::int32_t*>(take(sizeof(std::int32_t)));
}

}  // namespace deep_ep
