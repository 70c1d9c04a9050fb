#include "csrc/buffer/normal_mode.hpp"

#include <algorithm>
#include <array>
#include <thread>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/interrupt.hpp"
#include "kernels/normal/combine_push.hpp"

namespace deep_ep {
namespace {

constexpr std::int64_t kProtocolVersion = 3;

/// Of arguments that have been checked, or are about to be.
int num_experts(const DispatchArguments& arguments) {
  return static_cast<int>(arguments.num_tokens_per_expert.size(0));
}

void check_layout(const DispatchArguments& arguments, const Runtime& runtime) {
  const std::int64_t tokens = arguments.x.size(0);
  const auto given = [](const char* name, const ConstTensorView& tensor) {
    if (tensor.dims == 0) fail<InvalidArgument>("{} is missing: dispatch needs the layout", name);
  };
  given("num_tokens_per_rank", arguments.num_tokens_per_rank);
  given("is_token_in_rank", arguments.is_token_in_rank);
  given("num_tokens_per_expert", arguments.num_tokens_per_expert);
  check_tensor("num_tokens_per_rank", arguments.num_tokens_per_rank, runtime.device(), {DType::int32},
               {runtime.num_ranks()});
  check_tensor("is_token_in_rank", arguments.is_token_in_rank, runtime.device(), {DType::boolean, DType::uint8},
               {tokens, runtime.num_ranks()});
  check_tensor("num_tokens_per_expert", arguments.num_tokens_per_expert, runtime.device(), {DType::int32}, {kAnySize});
  const std::int64_t experts = num_experts(arguments);
  if (experts == 0 || experts % runtime.num_ranks() != 0 ||
      experts / runtime.num_ranks() > runtime.options().max_local_experts) {
    fail<InvalidArgument>(
        "num_tokens_per_expert counts {} experts, allowed: a multiple of the {} ranks, at most {} a rank", experts,
        runtime.num_ranks(), runtime.options().max_local_experts);
  }
  if (arguments.topk_weights && !arguments.topk_idx) {
    throw InvalidArgument("topk_weights is given, allowed: only with topk_idx, which is missing");
  }
  if (arguments.topk_idx) check_selections(*arguments.topk_idx, arguments.topk_weights, tokens, runtime);
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("num_worst_tokens", arguments.num_worst_tokens, 0, INT32_MAX);
}

bool is_missing(const DispatchHandle* handle) { return handle == nullptr || !handle->destination_row.defined(); }

void check_ranks(const DispatchHandle& handle, const Runtime& runtime) {
  if (handle.destination_row.size(1) == runtime.num_ranks()) return;
  fail<InvalidArgument>("handle is of a buffer with {} ranks, this one has {}", handle.destination_row.size(1),
                        runtime.num_ranks());
}

std::int64_t row_bytes(const ConstTensorView& rows) {
  return rows.size(1) * static_cast<std::int64_t>(size_of(rows.dtype));
}

/// `width`: ranks of a node.
void check_combine(const CombineArguments& arguments, int width, const Runtime& runtime) {
  if (is_missing(arguments.handle)) {
    throw InvalidArgument("handle is missing: combine needs the handle of the dispatch whose rows come back");
  }
  const DispatchHandle& handle = *arguments.handle;
  check_ranks(handle, runtime);
  check_tensor("handle.rank_prefix_matrix", handle.rank_prefix_matrix.view(), runtime.device(), {DType::int32},
               {runtime.num_ranks(), width});
  const ConstTensorView& x = arguments.x;
  check_tensor("x", x, runtime.device(), {DType::bfloat16}, {handle.num_recv_rows, kAnySize});
  check_row_bytes("x", x);
  if (arguments.topk_weights) {
    check_tensor("topk_weights", *arguments.topk_weights, runtime.device(), {DType::float32},
                 {handle.num_recv_rows, kAnySize});
    check_range("width of topk_weights", arguments.topk_weights->size(1), 1, kMaxTopk);
  }
  check_biases(arguments, handle.num_tokens, runtime);
  check_config(arguments.config, kernels::combine::kMaxThreads / 32);
}

NotifyCall notify_call(const DispatchArguments& arguments, const Runtime& runtime) {
  NotifyCall call{};
  call.shape =
      call_shape(arguments.x, arguments.x_scales, arguments.topk_idx, arguments.topk_weights, num_experts(arguments));
  call.num_tokens = static_cast<int>(arguments.x.size(0));
  call.num_local_experts = num_experts(arguments) / runtime.num_ranks();
  call.expert_alignment = arguments.expert_alignment;
  call.is_token_in_rank = arguments.is_token_in_rank.as<std::uint8_t>();
  call.num_tokens_per_rank = arguments.num_tokens_per_rank.as<std::int32_t>();
  call.num_tokens_per_expert = arguments.num_tokens_per_expert.as<std::int32_t>();
  return call;
}

SentRows sent_rows(const DispatchArguments& arguments, const Runtime& runtime) {
  SentRows params = sent_rows(arguments.x, arguments.x_scales);
  if (arguments.handle != nullptr) {
    params.num_local_experts = arguments.handle->num_experts / runtime.num_ranks();
    return params;
  }
  if (arguments.topk_idx) {
    params.topk_idx = {arguments.topk_idx->data, arguments.topk_idx->dtype == DType::int64};
    if (arguments.topk_weights) params.topk_weights = arguments.topk_weights->as<float>();
    params.rows.num_topk = static_cast<int>(arguments.topk_idx->size(1));
    params.rows.topk_idx_is_64_bit = params.topk_idx.is_64_bit;
  }
  params.num_local_experts = num_experts(arguments) / runtime.num_ranks();
  params.send_src_idx = true;
  params.fill_tail = arguments.num_worst_tokens > 0 && arguments.topk_idx.has_value();
  return params;
}

void check_layout_arguments(const ConstTensorView& topk_idx, int num_experts, const Runtime& runtime) {
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

/// Of a dispatch with these arguments.
void give(DispatchResult& result, const DispatchArguments& arguments, const DispatchOutputs& outputs) {
  result.recv_x = outputs.x;
  if (arguments.x_scales) result.recv_x_scales = outputs.scales;
  if (arguments.handle != nullptr) return;
  if (arguments.topk_idx) result.recv_topk_idx = outputs.topk_idx;
  if (arguments.topk_weights) result.recv_topk_weights = outputs.topk_weights;
}

}  // namespace

void check_sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales, const Config& config,
                     const Runtime& runtime) {
  check_tensor("x", x, runtime.device(), {}, {kAnySize, kAnySize});
  check_row_bytes("x", x);
  check_token_count("number of tokens", x.size(0), runtime.num_ranks());
  if (x_scales) {
    check_strided_tensor("x_scales", *x_scales, runtime.device(), {DType::float32, DType::int32},
                         {x.size(0), kAnySize});
    check_range("width of x_scales", x_scales->size(1), 0, INT32_MAX / 4);
  }
  check_config(config, kernels::dispatch::kMaxThreads / 32);
}

void check_selections(const ConstTensorView& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                      std::int64_t tokens, const Runtime& runtime) {
  check_tensor("topk_idx", topk_idx, runtime.device(), {DType::int32, DType::int64}, {tokens, kAnySize});
  check_range("width of topk_idx", topk_idx.size(1), 1, kMaxTopk);
  if (topk_weights) {
    check_tensor("topk_weights", *topk_weights, runtime.device(), {DType::float32}, {tokens, topk_idx.size(1)});
  }
}

void check_dispatch(const DispatchArguments& arguments, const Runtime& runtime) {
  check_sent_rows(arguments.x, arguments.x_scales, arguments.config, runtime);
  if (arguments.handle == nullptr) return check_layout(arguments, runtime);
  const DispatchHandle& handle = *arguments.handle;
  if (is_missing(&handle)) throw InvalidArgument("handle is empty, allowed: the handle of an earlier dispatch");
  check_ranks(handle, runtime);
  if (handle.num_tokens != arguments.x.size(0)) {
    fail<InvalidArgument>("x has {} rows, the handle's dispatch had {}", arguments.x.size(0), handle.num_tokens);
  }
}

void check_recording(const CallScope& scope, bool exact) {
  if (!scope.recording() || !exact) return;
  throw InvalidArgument(
      "num_worst_tokens is 0, but the stream records a CUDA graph: the host cannot wait for sizes then (a cached "
      "dispatch needs none)");
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

DispatchOutputs make_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                             const DispatchArguments* fresh, std::int64_t rows, const CallScope& scope) {
  // The rows by themselves, as they are large and often dropped early; so is what a handle keeps, which lives long. The
  // others share one piece of memory.
  std::array<std::vector<TensorView>, 3> wanted;
  auto& [rows_alone, beside, kept] = wanted;
  DispatchOutputs outputs;
  std::vector<Tensor*> places = {&outputs.x};
  rows_alone = {unplaced(x.device, x.dtype, {rows, x.size(1)})};
  const auto want_beside = [&](Tensor& tensor, DType dtype, std::int64_t width) {
    places.push_back(&tensor);
    beside.push_back(unplaced(x.device, dtype, {rows, width}));
  };
  if (x_scales) want_beside(outputs.scales, x_scales->dtype, x_scales->size(1));
  if (fresh != nullptr && fresh->topk_idx) {
    want_beside(outputs.topk_idx, fresh->topk_idx->dtype, fresh->topk_idx->size(1));
    want_beside(outputs.topk_weights, DType::float32, fresh->topk_idx->size(1));
  }
  if (fresh != nullptr) {
    places.push_back(&outputs.src_idx);
    kept = {unplaced(x.device, DType::int32, {rows})};
  }

  auto made = scope.try_heap_results(wanted);
  outputs.in_heap = made.has_value();
  if (!made) made = scope.result_tensors(wanted);
  for (std::size_t i = 0; i < places.size(); ++i) *places[i] = std::move((*made)[i]);
  return outputs;
}

CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, const CallScope& scope) {
  std::vector<std::vector<TensorView>> wanted = {{unplaced(x.device, DType::bfloat16, {tokens, x.size(1)})}};
  if (weights != 0) wanted.push_back({unplaced(x.device, DType::float32, {tokens, weights})});
  const std::vector<Tensor> made = scope.result_tensors(wanted);
  for (const Tensor& tensor : made) scope.hand_out(tensor);
  CombineResult result;
  result.combined_x = made[0];
  if (weights != 0) result.combined_topk_weights = made[1];
  return result;
}

void wait_for_counts(Runtime& runtime, const HostCounts& counts, CallScope& scope) {
  Faults& faults = runtime.faults();
  const double timeout_s = runtime.timeout_s();
  // The kernel has the real deadline, and says for which rank it waited. Ours is for a kernel that never started.
  const Deadline deadline(timeout_s == 0 ? 0 : timeout_s * 2 + 10);
  const Backoff backoff;
  const bool on_cpu = !runtime.on_gpu();
  for (std::uint64_t spins = 1; __atomic_load_n(&counts.epoch, __ATOMIC_ACQUIRE) == 0; ++spins) {
    if (spins % 64 != 0) continue;
    if (faults.met()) break;
    if (on_cpu) std::this_thread::sleep_for(backoff.nap());  // the kernel needs the processor
    if (spins % 4096 == 0 || on_cpu) {
      if (InterruptScope::wanted()) {
        scope.abandon();  // so that its kernel is waited for
        faults.break_by_interruption();
      }
      if (deadline.expired()) {
        faults.break_by_timeout(
            fmt::format("rank {}: no counts of a dispatch arrived within {} s, and no kernel says why: "
                        "earlier work on the stream has not ended, or the GPU is lost",
                        runtime.rank(), deadline.seconds()));
      }
    }
  }
  // Notes wait for the next call: the counts are exchanged, and the peers expect our rows.
  if (!faults.met()) return;
  scope.abandon();  // so that raise waits for the kernel
  faults.raise();
}

NormalMode::NormalMode(Runtime& runtime) : runtime_(runtime) {
  common_.rank = runtime.rank();
  common_.num_ranks = runtime.num_ranks();
  common_.control = runtime.layout().control;
}

void NormalMode::allocate() {
  const auto ranks = static_cast<std::size_t>(runtime_.num_ranks());
  const auto experts = static_cast<std::size_t>(runtime_.options().max_local_experts);
  host_counts_ = pinned_memory<HostCounts>(runtime_.executor(), sizeof(HostCounts) + sizeof(std::int32_t) * experts);
  state_ = runtime_.zeroed_memory<KernelState>();
  common_.state = state_.get();
  // Ranks, experts, and nodes, which are at most ranks.
  layout_work_ =
      runtime_.zeroed_memory<LayoutWork>(sizeof(LayoutWork) + sizeof(std::int32_t) * (ranks + ranks * experts + ranks));
}

DispatchLayout NormalMode::count(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call) {
  check_layout_arguments(topk_idx, num_experts, runtime_);
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  DispatchLayout layout = count(topk_idx, num_experts, scope);
  scope.hand_out(layout.num_tokens_per_rank);  // they share their memory
  layout.event = scope.finish();
  return layout;
}

DispatchLayout NormalMode::count(const ConstTensorView& topk_idx, int num_experts, const CallScope& scope) const {
  const Backend& executor = *runtime_.executor();
  const Device device = runtime_.device();

  LayoutParams params{};
  params.topk_idx = {topk_idx.data, topk_idx.dtype == DType::int64};
  params.num_tokens = static_cast<int>(topk_idx.size(0));
  params.num_topk = static_cast<int>(topk_idx.size(1));
  params.num_experts = num_experts;
  params.num_ranks = runtime_.num_ranks();
  params.ranks_per_node = runtime_.nodes().ranks_of_each_node();
  params.num_nodes = params.ranks_per_node == 0 ? 0 : runtime_.nodes().num_nodes;
  params.work = layout_work_.get();
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

DispatchResult NormalMode::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, runtime_);
  if (arguments.handle != nullptr) check_handle(*arguments.handle);
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  DispatchResult result = dispatch(arguments, scope);
  hand_out(result.handle, scope);
  scope.hand_out(result.recv_x);
  for (const auto* beside : {&result.recv_x_scales, &result.recv_topk_idx, &result.recv_topk_weights}) {
    if (*beside) scope.hand_out(**beside);
  }
  result.event = scope.finish();
  return result;
}

DispatchResult NormalMode::dispatch(const DispatchArguments& arguments, CallScope& scope) {
  const SentRows rows = sent_rows(arguments, runtime_);
  check_room(rows.rows);
  if (arguments.handle != nullptr) {
    DispatchResult result;
    result.handle = *arguments.handle;
    const DispatchOutputs outputs =
        make_outputs(arguments.x, arguments.x_scales, nullptr, result.handle.num_recv_rows, scope);
    send(rows, arguments.config, result.handle, outputs, 0, scope);
    give(result, arguments, outputs);
    return result;
  }
  const bool exact = arguments.num_worst_tokens == 0;
  check_recording(scope, exact);
  // Memory for the worst case is made before the exchange: it may throw, and the peers do not count on this rank yet.
  DispatchOutputs outputs;
  DispatchResult result;
  DispatchHandle& handle = result.handle;
  handle.num_tokens = arguments.x.size(0);
  handle.num_experts = num_experts(arguments);
  handle.num_topk = arguments.topk_idx ? static_cast<int>(arguments.topk_idx->size(1)) : 0;
  const auto make_room = [&](std::int64_t received, std::int64_t relayed) {
    handle.num_recv_rows = received;
    outputs = make_outputs(arguments.x, arguments.x_scales, &arguments, received, scope);
    if (common_.peers == nullptr) return;
    handle.relay_rows = scope.pool_tensor(unplaced(runtime_.device(), DType::int32, {relayed, common_.grid.width}));
  };
  if (!exact) make_room(arguments.num_worst_tokens, arguments.num_worst_tokens * runtime_.node_grid().width);

  HostCounts& counts = *host_counts_;
  NotifyCall exchange = notify_call(arguments, runtime_);
  exchange.wait = runtime_.faults().wait_context();
  exchange.host_counts = exact ? &counts : nullptr;
  if (exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  notify(exchange, handle, scope);
  if (exact) {
    wait_for_counts(runtime_, counts, scope);
    result.num_recv_tokens_per_expert.assign(counts.tokens_per_expert,
                                             counts.tokens_per_expert + exchange.num_local_experts);
    make_room(counts.num_recv_tokens, counts.num_relay_rows);
  }
  handle.recv_src_idx = outputs.src_idx;
  send(rows, arguments.config, handle, outputs, 0, scope);
  give(result, arguments, outputs);
  return result;
}

void NormalMode::notify(const NotifyCall& notify, DispatchHandle& handle, const CallScope& scope) const {
  const int ranks = runtime_.num_ranks();
  const int nodes = common_.peers == nullptr ? 0 : common_.grid.nodes();
  std::vector wanted = {unplaced(runtime_.device(), DType::int32, {ranks, common_.grid.width}),
                        unplaced(runtime_.device(), DType::int32, {handle.num_tokens, ranks})};
  if (nodes != 0) {
    wanted.push_back(unplaced(runtime_.device(), DType::int32, {handle.num_tokens, nodes}));
    wanted.push_back(unplaced(runtime_.device(), DType::int32, {2, nodes}));
  }
  const std::vector<Tensor> tables = scope.pool_tensors(wanted);
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];
  NotifyParams params{};
  static_cast<NotifyCall&>(params) = notify;
  params.common = common_;
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  if (nodes != 0) {
    handle.node_row = tables[2];
    handle.node_counts = tables[3];
    params.node_row = handle.node_row.as<std::int32_t>();
    params.node_counts = handle.node_counts.as<std::int32_t>();
  }
  const auto kernel = nodes == 0 ? choices::notify : choices::notify_internode;
  const LaunchShape shape{
      std::min(ranks + nodes, runtime_.policy().multiprocessors),
      runtime_.on_gpu() ? kernel.max_threads : std::min(runtime_.policy().warps_per_block * 32, kernel.max_threads),
      sizeof(NotifyShared)};
  (runtime_.executor()->kernels().*kernel.launcher)(params, shape, scope.stream());
}

TransferParams NormalMode::transfer(const DispatchHandle& handle) const {
  TransferParams params{};
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.num_tokens = static_cast<int>(handle.num_tokens);
  return params;
}

void NormalMode::send(const SentRows& rows, const Config& config, const DispatchHandle& handle,
                      const DispatchOutputs& outputs, int weights, const CallScope& scope) {
  DispatchParams params{};
  static_cast<SentRows&>(params) = rows;
  params.weights_as_scales = weights;
  params.transfer = transfer(handle);
  params.output = outputs.targets();
  params.output_rows = handle.num_recv_rows;
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  launch(params, config, handle, outputs, scope);
}

void NormalMode::add_up(const CombineArguments& arguments, const CombineResult& result, const CallScope& scope) {
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  const DispatchHandle& handle = *arguments.handle;
  CombineParams params{};
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = weights ? static_cast<int>(weights->size(1)) : 0;
  params.transfer = transfer(handle);
  params.bias[0] = arguments.bias_0 ? arguments.bias_0->as<std::byte>() : nullptr;
  params.bias[1] = arguments.bias_1 ? arguments.bias_1->as<std::byte>() : nullptr;
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  // A rank that received nothing has nothing to read; frameworks give its empty tensors no address.
  params.x = x.size(0) == 0 ? runtime_.heap()->local() : x.as<std::byte>();
  params.combined_x = result.combined_x.as<std::byte>();
  if (weights) {
    params.combined_weights = result.combined_topk_weights->as<float>();
    if (x.size(0) != 0) params.topk_weights = weights->as<float>();
  }
  launch(params, arguments, scope);
}

void NormalMode::enqueue(DispatchParams& params, int blocks, const CallScope& scope) const {
  TransferParams& transfer = params.transfer;
  const std::size_t shared_bytes =
      plan_stages(transfer.stages, transfer.stage_bytes, transfer.moving_warps(), params.rows.row_bytes,
                  runtime_.policy().max_shared_bytes, [&](int stages, std::uint32_t stage_bytes) {
                    return DispatchShared(Carver::without_memory(), transfer, blocks, stages, stage_bytes).bytes;
                  });
  const auto kernel = common_.peers == nullptr ? choices::dispatch : choices::dispatch_and_notify_internode;
  (runtime_.executor()->kernels().*kernel.launcher)(params, {blocks, transfer.warps() * 32, shared_bytes},
                                                    scope.stream());
}

void NormalMode::enqueue(CombineParams& params, int blocks, const CallScope& scope) const {
  TransferParams& transfer = params.transfer;
  const auto shared_bytes = [&](int stages, std::uint32_t stage_bytes) {
    return CombineShared(Carver::without_memory(), transfer, blocks, stages, stage_bytes).bytes;
  };
  if (transfer.local_warps != 0) {  // warps that add work in registers
    plan_stages(transfer.stages, transfer.stage_bytes, transfer.pushing_warps(), params.row_bytes,
                runtime_.policy().max_shared_bytes, shared_bytes);
  }
  const auto kernel = common_.peers == nullptr ? choices::combine : choices::combine_and_notify_internode;
  (runtime_.executor()->kernels().*kernel.launcher)(
      params, {blocks, transfer.warps() * 32, shared_bytes(transfer.stages, transfer.stage_bytes)}, scope.stream());
}

CombineResult NormalMode::combine(const CombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments, common_.grid.width, runtime_);
  check_handle(*arguments.handle);
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  CombineResult result = make_sums(arguments.x, arguments.handle->num_tokens,
                                   arguments.topk_weights ? arguments.topk_weights->size(1) : 0, scope);
  add_up(arguments, result, scope);
  result.event = scope.finish();
  return result;
}

void NormalMode::hand_out(const DispatchHandle& handle, const CallScope& scope) {
  for (const Tensor* tensor :
       {&handle.recv_src_idx, &handle.destination_row, &handle.rank_prefix_matrix, &handle.relay_rows}) {
    scope.hand_out(*tensor);
  }
}

}  // namespace deep_ep
