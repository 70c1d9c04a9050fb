#include "csrc/buffer/normal_mode.hpp"

#include <algorithm>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/interrupt.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep {
namespace {

constexpr std::int64_t kProtocolVersion = 4;

/// Of arguments that have been checked, or are about to be.
int num_experts(const DispatchArguments& arguments) {
  return static_cast<int>(arguments.num_tokens_per_expert.size(0));
}

void check_layout(const DispatchArguments& arguments, const Runtime& runtime) {
  const std::int64_t tokens = arguments.x.size(0);
  for (const auto& [name, tensor] : {std::pair("num_tokens_per_rank", &arguments.num_tokens_per_rank),
                                     std::pair("is_token_in_rank", &arguments.is_token_in_rank),
                                     std::pair("num_tokens_per_expert", &arguments.num_tokens_per_expert)}) {
    if (tensor->dims == 0) fail<InvalidArgument>("{} is missing: dispatch needs the layout", name);
  }
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
  if (arguments.topk_idx) check_selections(arguments, runtime);
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("num_worst_tokens", arguments.num_worst_tokens, 0, INT32_MAX);
}

std::int64_t row_bytes(const ConstTensorView& rows) {
  return rows.size(1) * static_cast<std::int64_t>(size_of(rows.dtype));
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
  const int threads = std::min(256, policy.warps_per_block * 32);
  const int blocks = (params.num_tokens * params.num_ranks - 1) / threads + 1;
  return {std::clamp(blocks, 1, policy.multiprocessors), threads,
          LayoutShared(Carver::without_memory(), params.num_ranks, params.num_experts, params.num_nodes).bytes};
}

}  // namespace

void check_sent_rows(const DispatchArguments& arguments, const Runtime& runtime) {
  const ConstTensorView& x = arguments.x;
  check_tensor("x", x, runtime.device(), {}, {kAnySize, kAnySize});
  check_row_bytes("x", x);
  check_token_count("number of tokens", x.size(0), runtime.num_ranks());
  if (const auto& scales = arguments.x_scales) {
    check_strided_tensor("x_scales", *scales, runtime.device(), {DType::float32, DType::int32}, {x.size(0), kAnySize});
    check_range("width of x_scales", scales->size(1), 0, INT32_MAX / 4);
  }
  check_config(arguments.config);
}

void check_selections(const DispatchArguments& arguments, const Runtime& runtime) {
  const ConstTensorView& topk_idx = *arguments.topk_idx;
  const std::int64_t tokens = arguments.x.size(0);
  check_tensor("topk_idx", topk_idx, runtime.device(), {DType::int32, DType::int64}, {tokens, kAnySize});
  check_range("width of topk_idx", topk_idx.size(1), 1, kMaxTopk);
  if (const auto& weights = arguments.topk_weights) {
    check_tensor("topk_weights", *weights, runtime.device(), {DType::float32}, {tokens, topk_idx.size(1)});
  }
}

void check_recording(const CallScope& scope, bool exact) {
  if (!scope.recording() || !exact) return;
  throw InvalidArgument(
      "num_worst_tokens is 0, but the stream records a CUDA graph: the host cannot wait for sizes then (a cached "
      "dispatch needs none)");
}

CallShape call_shape(const DispatchArguments& arguments, int num_experts) {
  const auto& scales = arguments.x_scales;
  const auto& selections = arguments.topk_idx;
  return {{row_bytes(arguments.x), scales ? row_bytes(*scales) : 0, selections ? selections->size(1) : 0,
           selections ? static_cast<std::int64_t>(size_of(selections->dtype)) : 0, num_experts,
           static_cast<std::int64_t>(arguments.x.dtype), scales ? static_cast<std::int64_t>(scales->dtype) : 0,
           kProtocolVersion, arguments.topk_weights ? 1 : 0}};
}

SentRows sent_rows(const DispatchArguments& arguments, int num_local_experts) {
  SentRows params{};
  params.num_tokens = static_cast<int>(arguments.x.size(0));
  params.x = arguments.x.as<std::byte>();
  params.rows.row_bytes = static_cast<std::uint32_t>(row_bytes(arguments.x));
  if (const auto& scales = arguments.x_scales) {
    params.rows.num_scales = static_cast<int>(scales->size(1));
    params.scales = {scales->as<std::uint32_t>(), scales->stride(0), scales->stride(1)};
  }
  if (arguments.handle != nullptr) return params;
  params.num_local_experts = num_local_experts;
  params.send_src_idx = true;
  if (const auto& selections = arguments.topk_idx) {
    params.topk_idx = indices_of(*selections);
    params.topk_weights = memory_of<float>(arguments.topk_weights);
    params.rows.num_topk = static_cast<int>(selections->size(1));
    params.rows.topk_idx_is_64_bit = params.topk_idx.is_64_bit;
    params.fill_tail = arguments.num_worst_tokens > 0;
  }
  return params;
}

DispatchOutputs make_outputs(const DispatchArguments& arguments, std::int64_t rows, const CallScope& scope) {
  // The rows by themselves, as they are large and often dropped early; so is what a handle keeps, which lives long. The
  // others share one piece of memory.
  WantedTensors wanted(arguments.x.device, 3);
  DispatchOutputs outputs;
  wanted.add(outputs.x, arguments.x.dtype, {rows, arguments.x.size(1)});
  if (const auto& scales = arguments.x_scales) wanted.add(outputs.scales, scales->dtype, {rows, scales->size(1)}, 1);
  if (arguments.handle == nullptr) {
    if (const auto& selections = arguments.topk_idx) {
      wanted.add(outputs.topk_idx, selections->dtype, {rows, selections->size(1)}, 1);
      wanted.add(outputs.topk_weights, DType::float32, {rows, selections->size(1)}, 1);
    }
    wanted.add(outputs.src_idx, DType::int32, {rows}, 2);
  }
  auto made = scope.try_heap_results(wanted.pieces());
  outputs.in_heap = made.has_value();
  wanted.place(made ? *std::move(made) : scope.result_tensors(wanted.pieces()));
  return outputs;
}

CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, const CallScope& scope) {
  CombineResult result;
  WantedTensors wanted(x.device, 2);
  wanted.add(result.combined_x, DType::bfloat16, {tokens, x.size(1)});
  if (weights != 0) wanted.add(result.combined_topk_weights.emplace(), DType::float32, {tokens, weights}, 1);
  wanted.place(scope.result_tensors(wanted.pieces()));
  scope.hand_out(result.combined_x);
  if (weights != 0) scope.hand_out(*result.combined_topk_weights);
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
        faults.break_by<TimeoutError>(
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
  common_.grid = {runtime.rank(), runtime.num_ranks(), runtime.num_ranks()};
  if (runtime.layout().internode.bytes != 0) {
    common_.grid = runtime.node_grid();
    connections_ = runtime.take_connections(BufferPlan::kNormalMode);
  }
  agree(runtime.bootstrap(), "allocating memory for the calls of a Buffer", [this] { allocate(); });
  if (rails()) log::info("buffer: rank {} in normal mode between nodes: {}", runtime.rank(), describe_rails());
}

void NormalMode::allocate() {
  const auto ranks = static_cast<std::size_t>(runtime_.num_ranks());
  const auto experts = static_cast<std::size_t>(runtime_.options().max_local_experts);
  host_counts_ = pinned_memory<HostCounts>(runtime_.executor(), sizeof(HostCounts) + sizeof(std::int32_t) * experts);
  state_ = runtime_.zeroed_memory<KernelState>();
  // Ranks, experts, and nodes, which are at most ranks.
  layout_work_ =
      runtime_.zeroed_memory<LayoutWork>(sizeof(LayoutWork) + sizeof(std::int32_t) * (ranks + ranks * experts + ranks));
  const auto others = static_cast<std::size_t>(common_.grid.others());
  const std::size_t chunks = others * Rings::kMostChunks;
  counters_ = runtime_.zeroed_memory<std::uint32_t>((2 * chunks + static_cast<std::size_t>(common_.grid.width)) *
                                                    sizeof(std::uint32_t));
  common_.heaps = runtime_.heap()->device_peers();
  common_.state = state_.get();
  common_.local_tickets = counters_.get() + 2 * chunks;
  if (!rails()) return;
  rail_states_ = runtime_.zeroed_memory<RailState>(others * sizeof(RailState));
  sent_ = runtime_.zeroed_memory<std::uint64_t>(chunks * sizeof(std::uint64_t));
  common_.window = runtime_.layout().internode;
  common_.lanes = runtime_.internode_lanes();
  common_.peers = connections_->device_peers();
  common_.rails = rail_states_.get();
  common_.staged = counters_.get();
  common_.read = counters_.get() + chunks;
  common_.sent = sent_.get();
}

std::string NormalMode::describe_rails() const {
  return common_.lanes == 1 ? connections_->describe()
                            : fmt::format("{} lanes, {}", common_.lanes, connections_->describe());
}

void NormalMode::check_handle(const DispatchHandle* handle) const {
  if (handle == nullptr || !handle->destination_row.defined()) {
    throw InvalidArgument("handle is missing or empty, allowed: that of the dispatch whose rows come back or go again");
  }
  if (handle->destination_row.size(1) != common_.num_ranks) {
    fail<InvalidArgument>("handle is of a buffer with {} ranks, this one has {}", handle->destination_row.size(1),
                          common_.num_ranks);
  }
  check_tensor("handle.rank_prefix_matrix", handle->rank_prefix_matrix.view(), runtime_.device(), {DType::int32},
               {common_.num_ranks, common_.grid.width});
  const int nodes = common_.grid.nodes();
  if (rails() && !(handle->node_row.defined() && handle->node_counts.defined() && handle->relay_rows.defined() &&
                   handle->node_row.size(1) == nodes)) {
    fail<InvalidArgument>("handle is not of a dispatch between {} nodes", nodes);
  }
}

void NormalMode::check_dispatched(const DispatchHandle* handle, std::int64_t tokens) const {
  check_handle(handle);
  if (handle->num_tokens == tokens) return;
  fail<InvalidArgument>("x has {} rows, the handle's dispatch had {}", tokens, handle->num_tokens);
}

void NormalMode::check_combine(const CombineArguments& arguments) const {
  check_handle(arguments.handle);
  const Device device = runtime_.device();
  const std::int64_t rows = arguments.handle->num_recv_rows;
  check_tensor("x", arguments.x, device, {DType::bfloat16}, {rows, kAnySize});
  check_row_bytes("x", arguments.x);
  if (arguments.topk_weights) {
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32}, {rows, kAnySize});
    check_range("width of topk_weights", arguments.topk_weights->size(1), 1, kMaxTopk);
  }
  check_biases(arguments, arguments.handle->num_tokens, runtime_);
  check_config(arguments.config);
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
  LayoutParams params{};
  params.topk_idx = indices_of(topk_idx);
  params.num_tokens = static_cast<int>(topk_idx.size(0));
  params.num_topk = static_cast<int>(topk_idx.size(1));
  params.num_experts = num_experts;
  params.num_ranks = runtime_.num_ranks();
  params.ranks_per_node = runtime_.nodes().ranks_of_each_node();
  params.num_nodes = params.ranks_per_node == 0 ? 0 : runtime_.nodes().num_nodes;
  params.work = layout_work_.get();

  DispatchLayout layout;
  WantedTensors wanted(runtime_.device());
  wanted.add(layout.num_tokens_per_rank, DType::int32, {params.num_ranks});
  wanted.add(layout.num_tokens_per_expert, DType::int32, {num_experts});
  wanted.add(layout.is_token_in_rank, DType::boolean, {params.num_tokens, params.num_ranks});
  if (params.num_nodes != 0) wanted.add(layout.num_tokens_per_node, DType::int32, {params.num_nodes});
  wanted.place(scope.result_tensors(wanted.pieces()));
  params.num_tokens_per_rank = layout.num_tokens_per_rank.as<std::int32_t>();
  params.num_tokens_per_expert = layout.num_tokens_per_expert.as<std::int32_t>();
  params.num_tokens_per_node = layout.num_tokens_per_node.as<std::int32_t>();
  params.is_token_in_rank = layout.is_token_in_rank.as<std::uint8_t>();
  executor.kernels().layout(params, plan_launch(params, executor.policy()), scope.stream());
  return layout;
}

DispatchResult NormalMode::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_sent_rows(arguments, runtime_);
  if (arguments.handle != nullptr) {
    check_dispatched(arguments.handle, arguments.x.size(0));
  } else {
    check_layout(arguments, runtime_);
  }
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
  const bool fresh = arguments.handle == nullptr;
  const SentRows rows = sent_rows(arguments, fresh ? num_experts(arguments) / common_.num_ranks : 0);
  check_room(rows.rows);
  DispatchResult result;
  DispatchOutputs outputs;
  if (fresh) {
    outputs = exchange(arguments, result, scope);
  } else {
    result.handle = *arguments.handle;
    outputs = make_outputs(arguments, result.handle.num_recv_rows, scope);
  }
  send(rows, arguments.config, result.handle, outputs, scope);
  result.recv_x = outputs.x;
  if (arguments.x_scales) result.recv_x_scales = outputs.scales;
  if (fresh && arguments.topk_idx) result.recv_topk_idx = outputs.topk_idx;
  if (fresh && arguments.topk_weights) result.recv_topk_weights = outputs.topk_weights;
  return result;
}

DispatchOutputs NormalMode::exchange(const DispatchArguments& arguments, DispatchResult& result, CallScope& scope) {
  const bool exact = arguments.num_worst_tokens == 0;
  check_recording(scope, exact);
  DispatchHandle& handle = result.handle;
  handle.num_tokens = arguments.x.size(0);
  handle.num_experts = num_experts(arguments);
  handle.num_topk = arguments.topk_idx ? static_cast<int>(arguments.topk_idx->size(1)) : 0;
  DispatchOutputs outputs;
  const auto make_room = [&](std::int64_t received, std::int64_t relayed) {
    handle.num_recv_rows = received;
    outputs = make_outputs(arguments, received, scope);
    handle.recv_src_idx = outputs.src_idx;
    if (!rails()) return;
    handle.relay_rows = scope.pool_tensor(unplaced(runtime_.device(), DType::int32, {relayed, common_.grid.width}));
  };
  HostCounts& counts = *host_counts_;
  if (!exact) {
    // Memory for the worst case is made before the exchange: it may throw, and no peer counts on this rank yet.
    make_room(arguments.num_worst_tokens, arguments.num_worst_tokens * common_.grid.width);
    notify(arguments, nullptr, handle, scope);
    return outputs;
  }
  __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  notify(arguments, &counts, handle, scope);
  wait_for_counts(runtime_, counts, scope);
  result.num_recv_tokens_per_expert.assign(counts.tokens_per_expert,
                                           counts.tokens_per_expert + handle.num_experts / common_.num_ranks);
  make_room(counts.num_recv_tokens, counts.num_relay_rows);
  return outputs;
}

void NormalMode::notify(const DispatchArguments& arguments, HostCounts* host_counts, DispatchHandle& handle,
                        const CallScope& scope) const {
  const int ranks = common_.num_ranks, nodes = rails() ? common_.grid.nodes() : 0;
  WantedTensors tables(runtime_.device());
  tables.add(handle.rank_prefix_matrix, DType::int32, {ranks, common_.grid.width});
  tables.add(handle.destination_row, DType::int32, {handle.num_tokens, ranks});
  if (nodes != 0) {
    tables.add(handle.node_row, DType::int32, {handle.num_tokens, nodes});
    tables.add(handle.node_counts, DType::int32, {2, nodes});
  }
  tables.place_in_pool(scope);
  NotifyParams params{};
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.shape = call_shape(arguments, handle.num_experts);
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.num_local_experts = handle.num_experts / ranks;
  params.expert_alignment = arguments.expert_alignment;
  params.is_token_in_rank = arguments.is_token_in_rank.as<std::uint8_t>();
  params.num_tokens_per_expert = arguments.num_tokens_per_expert.as<std::int32_t>();
  params.host_counts = host_counts;
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.node_row = handle.node_row.as<std::int32_t>();
  params.node_counts = handle.node_counts.as<std::int32_t>();
  const auto kernel = rails() ? choices::notify_internode : choices::notify;
  const LaunchShape shape{std::min(ranks + nodes, runtime_.policy().multiprocessors),
                          runtime_.warps(kernel.max_threads) * 32, sizeof(device::Numbering)};
  (runtime_.executor()->kernels().*kernel.launcher)(params, shape, scope.stream());
}

void NormalMode::hand_out(const DispatchHandle& handle, const CallScope& scope) {
  for (const Tensor* tensor :
       {&handle.recv_src_idx, &handle.destination_row, &handle.rank_prefix_matrix, &handle.relay_rows}) {
    scope.hand_out(*tensor);
  }
}

EventHandle NormalMode::barrier(const CallOptions& call) {
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  if (!rails()) {
    const int most = runtime_.policy().warps_per_block * 32;
    const int threads = std::min((common_.num_ranks + 31) / 32 * 32, std::min(most, kernels::barrier::kMaxThreads));
    runtime_.executor()->kernels().barrier({common_, runtime_.faults().wait_context()}, {1, threads}, scope.stream());
    return scope.finish();
  }
  // Counts of all ranks are exchanged, even where all are 0.
  const Tensor counts = scope.pool_tensor(unplaced(runtime_.device(), DType::int32, {common_.num_ranks}));
  runtime_.executor()->fill(counts.data(), 0, counts.view().bytes(), scope.stream());
  DispatchArguments nothing;
  nothing.x = unplaced(runtime_.device(), DType::uint8, {0, 16});
  nothing.is_token_in_rank = unplaced(runtime_.device(), DType::uint8, {0, common_.num_ranks});
  nothing.num_tokens_per_rank = nothing.num_tokens_per_expert = counts.view();
  nothing.num_worst_tokens = 1;
  const DispatchResult came = scope.inside([&] { return dispatch(nothing, scope); });
  return scope.finish();
}

}  // namespace deep_ep
