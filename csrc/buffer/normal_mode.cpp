#include "csrc/buffer/normal_mode.hpp"

#include <thread>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {
namespace {

int num_experts(const DispatchArguments& arguments) {
  return static_cast<int>(arguments.num_tokens_per_expert.size(0));
}

void check_layout(const DispatchArguments& arguments, const Runtime& runtime) {
  const std::int64_t tokens = arguments.x.size(0);
  for (const auto& [name, tensor] : {std::pair("is_token_in_rank", &arguments.is_token_in_rank),
                                     std::pair("num_tokens_per_expert", &arguments.num_tokens_per_expert)}) {
    if (tensor->dims == 0) fail<InvalidArgument>("{} is missing: dispatch needs the layout", name);
  }
  check_tensor("is_token_in_rank", arguments.is_token_in_rank, runtime.device(), {DType::boolean, DType::uint8},
               {tokens, runtime.num_ranks()});
  check_tensor("num_tokens_per_expert", arguments.num_tokens_per_expert, runtime.device(), {DType::int32}, {kAnySize});
  check_experts("number of experts in num_tokens_per_expert", num_experts(arguments), runtime.num_ranks(),
                runtime.options().max_local_experts);
  if (arguments.topk_weights && !arguments.topk_idx) {
    throw InvalidArgument("topk_weights is given, allowed: only with topk_idx, which is missing");
  }
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("num_worst_tokens", arguments.num_worst_tokens, 0, INT32_MAX);
}

/// OutOfMemory for rings without a row from each rank.
void require_slots(const LocalRings& rings, const NormalMode& mode) {
  if (rings.slots != 0) return;
  fail<OutOfMemory>(
      "rows outside the heap of {} go through {} of {}, which does not hold a row of {} from each of {} ranks: raise "
      "{}",
      format_bytes(mode.runtime.heap()->bytes()), mode.rails() ? "a quarter of its window" : "its window",
      format_bytes(mode.runtime.layout().window_bytes), format_bytes(rings.slot_bytes), mode.common.num_ranks,
      mode.rails() ? "internode.heap_bytes, or heap_bytes if that is 0" : "heap_bytes or window_bytes");
}

/// Of a dispatch or combine of rows of so many bytes, all included: with rings, without roles of warps. OutOfMemory
/// where the window is too small for those to other nodes.
TransferParams transfer_params(std::size_t row_bytes, bool dispatches, const NormalMode& mode) {
  const NormalParams& common = mode.common;
  const HeapLayout& layout = mode.runtime.layout();
  const bool rails = mode.rails();
  const std::size_t local_bytes =
      rails ? LocalRings::bytes_of(layout.window_bytes, common.num_ranks) : layout.window_bytes;
  const std::size_t local_begin = layout.window_at() + layout.window_bytes - local_bytes;
  TransferParams params{};
  params.common = common;
  params.local = dispatches
                     ? LocalRings::make(local_begin, local_bytes, common.num_ranks, row_bytes,
                                        common.control.fetched_rows, Wanted::dispatch_rows, Wanted::dispatch_credit)
                     : LocalRings::make(local_begin, local_bytes, common.num_ranks, row_bytes,
                                        common.control.pushed_rows, Wanted::combine_rows, Wanted::combine_credit);
  if (!rails) return params;
  params.rings = Rings::make(layout.window_at(), layout.window_bytes - local_bytes, common.grid.others(), row_bytes);
  if (params.rings.chunks != 0) return params;
  fail<OutOfMemory>(
      "the window of {} does not hold two rows of {} to and from each of the {} other nodes: raise "
      "internode.heap_bytes, or heap_bytes if that is 0",
      format_bytes(layout.window_bytes), format_bytes(row_bytes), common.grid.others());
}

void set_handle(TransferParams& params, const DispatchHandle& handle, bool dispatches) {
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.num_tokens = static_cast<int>(handle.num_tokens());
  if (params.common.peers == nullptr) return;
  const auto* to = handle.node_counts.as<std::int32_t>();
  const auto* from = to + params.common.grid.nodes();
  params.counts = dispatches ? NodeCounts{to, from} : NodeCounts{from, to};  // rows go back to where they came from
  params.node_row = handle.node_row.as<std::int32_t>();
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  params.relay_rows_room = handle.relay_rows.view().size(0);
}

/// Copies `rows` rows at most, those that the call's handle counts, from one place in this device's memory to another.
SpreadRowsParams copied_rows(const TransferParams& call, const std::byte* from, std::byte* to, std::uint32_t row_bytes,
                             std::int64_t rows) {
  const NodeGrid& grid = call.common.grid;
  SpreadRowsParams params{};
  params.metadata.num_rows = params.num_spread = rows;
  params.metadata.num_valid = call.rank_prefix_matrix + (grid.num_ranks - 1) * grid.width + grid.index();
  params.abort = call.common.wait.abort;
  params.rows = from;
  params.spread_rows = to;
  params.row_bytes = row_bytes;
  return params;
}

/// Copies rows that have landed in the window to the results.
void copy_received(const DispatchParams& sent, const RowTargets& to, const Runtime& runtime, const CallScope& scope) {
  const RowTargets& from = sent.output;
  const RowShape& shape = sent.rows;
  SpreadRowsParams params = copied_rows(sent.transfer, from.x, to.x, shape.row_bytes, sent.output_rows);
  if (to.scales != nullptr) {
    params.scales = from.scales;
    params.spread_scales = to.scales;
    params.scale_stride = params.spread_stride = params.num_scales = shape.num_scales;
    params.spread_column_stride = 1;
  }
  const auto words = [](auto* target, const auto* source, std::uint32_t row_bytes) {
    return KeptWords{reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source), row_bytes};
  };
  params.kept[0] = words(to.src_idx, from.src_idx, sizeof(std::int32_t));
  params.kept[1] = words(to.topk_idx, from.topk_idx, shape.topk_idx_bytes());
  params.kept[2] = words(to.topk_weights, from.topk_weights, static_cast<std::uint32_t>(shape.num_topk) * 4);
  spread_rows(params, runtime.executor()->policy(), runtime, scope);
}

/// Copies the rows of a combine into the heap, at `to`, but for those that no other rank reads.
void copy_for_peers(const CombineParams& combine, std::byte* to, const Runtime& runtime, const CallScope& scope) {
  const NodeGrid& grid = combine.transfer.common.grid;
  SpreadRowsParams params = copied_rows(combine.transfer, combine.x, to, combine.row_bytes, combine.num_rows);
  const std::int32_t* const end = combine.transfer.rank_prefix_matrix + grid.rank * grid.width + grid.index();
  params.skipped[0] = grid.rank == 0 ? nullptr : end - grid.width;
  params.skipped[1] = end;
  spread_rows(params, runtime.executor()->policy(), runtime, scope);
}

/// The roles of a block's `warps` warps. `fewest_local`: of local warps; 0: none is needed.
void plan_warps(TransferParams& params, int blocks, int warps, int fewest_local) {
  const bool rails = params.common.peers != nullptr;
  if (rails) params.posters = (params.common.grid.others() * params.common.lanes + blocks - 1) / blocks;
  const int rest = std::max((rails ? 2 : 1) + fewest_local, warps - params.poster_warps());
  params.local_warps = fewest_local == 0 ? 0 : std::max(fewest_local, rest / 4);
  params.second_warps = rails ? (rest - params.local_warps + 1) / 2 : 0;
  params.first_warps = rest - params.local_warps - params.second_warps;
}

/// Of a dispatch without a handle: makes tables of the new handle, and enqueues the kernel that fills them. `params`:
/// what the call says.
void exchange_counts(NotifyParams& params, DispatchHandle& handle, const NormalMode& mode, const CallScope& scope) {
  const NormalParams& common = params.common = mode.common;
  const int ranks = common.num_ranks, nodes = mode.rails() ? common.grid.nodes() : 0;
  WantedTensors tables(mode.runtime.device());
  tables.add(handle.rank_prefix_matrix, &params.rank_prefix_matrix, DType::int32, {ranks, common.grid.width});
  tables.add(handle.destination_row, &params.destination_row, DType::int32, {params.num_tokens, ranks});
  if (nodes != 0) {
    tables.add(handle.node_row, &params.node_row, DType::int32, {params.num_tokens, nodes});
    tables.add(handle.node_counts, &params.node_counts, DType::int32, {2, nodes});
  }
  scope.make_tables(tables);
  const int warps = mode.runtime.warps(choices::notify.max_threads);
  mode.runtime.launch(choices::notify, params,
                      {std::min(ranks + nodes, mode.runtime.policy().multiprocessors), warps * 32,
                       static_cast<std::size_t>(warps) * sizeof(std::int32_t)},
                      scope);
  scope.begins();
}

/// Memory in `result` for `received` rows and what is beside them, and for `relayed` rows: in the heap, if that has
/// room for all; else outside, see CallScope::make_results. With selections there are weights, wanted or not. Returns
/// whether it is in the heap.
bool make_room(const DispatchArguments& arguments, DispatchParams& params, DispatchResult& result,
               std::int64_t received, std::int64_t relayed, const CallScope& scope) {
  DispatchHandle& handle = result.handle;
  if (const NodeGrid& grid = params.transfer.common.grid; grid.others() != 0 && arguments.handle == nullptr) {
    handle.relay_rows = scope.pool_tensor(unplaced(arguments.x.device, DType::int32, {relayed, int{grid.width}}));
  }
  // The rows by themselves, as they are large and often dropped early; so is what a handle keeps, which lives long. The
  // others share one piece of memory.
  WantedTensors wanted(arguments.x.device);
  RowTargets& rows = params.output;
  const std::int64_t room = params.output_rows = handle.num_recv_rows = received, topk = params.rows.num_topk;
  wanted.add(result.recv_x, &rows.x, arguments.x.dtype, {room, arguments.x.size(1)});
  wanted.begin_piece();
  if (const auto& scales = arguments.x_scales) {
    wanted.add(result.recv_x_scales.emplace(), &rows.scales, scales->dtype, {room, scales->size(1)});
  }
  if (topk != 0) {
    wanted.add(result.recv_topk_idx.emplace(), &rows.topk_idx, arguments.topk_idx->dtype, {room, topk});
    wanted.add(result.recv_topk_weights.emplace(), &rows.topk_weights, DType::float32, {room, topk});
  }
  wanted.begin_piece();
  if (params.send_src_idx) wanted.add(handle.recv_src_idx, &rows.src_idx, DType::int32, {room});
  if (scope.make_results(wanted, true)) return true;
  scope.make_results(wanted);
  return false;
}

}  // namespace

CallShape call_shape(const DispatchArguments& arguments, int num_experts) {
  const auto& scales = arguments.x_scales;
  const auto& selections = arguments.topk_idx;
  const auto word = [](auto number) { return static_cast<std::int32_t>(number); };
  return {{word(row_bytes(arguments.x)), scales ? word(row_bytes(*scales)) : 0,
           selections ? word(selections->size(1)) : 0, selections ? word(size_of(selections->dtype)) : 0, num_experts,
           word(arguments.x.dtype), scales ? word(scales->dtype) : 0, arguments.topk_weights ? 1 : 0}};
}

SentRows sent_rows(const DispatchArguments& arguments, int num_local_experts, const Runtime& runtime) {
  const ConstTensorView& x = arguments.x;
  const Device device = runtime.device();
  check_tensor("x", x, device, {}, {kAnySize, kAnySize});
  check_row_bytes("x", x);
  const std::int64_t tokens = x.size(0);
  check_token_count("number of tokens", tokens, runtime.nodes());
  check_sms(arguments.num_sms);
  SentRows sent{};
  RowShape& shape = sent.rows;
  sent.num_tokens = static_cast<int>(tokens);
  sent.x = x.as<std::byte>();
  shape.row_bytes = static_cast<std::uint32_t>(row_bytes(x));
  if (const auto& scales = arguments.x_scales) {
    check_strided_tensor("x_scales", *scales, device, {DType::float32, DType::int32}, {tokens, kAnySize});
    check_range("width of x_scales", scales->size(1), 0, INT32_MAX / 4);
    shape.num_scales = static_cast<int>(scales->size(1));
    sent.scales = {scales->as<std::uint32_t>(), scales->stride(0), scales->stride(1)};
  }
  sent.num_local_experts = num_local_experts;
  sent.send_src_idx = arguments.handle == nullptr;
  if (const auto& topk_idx = arguments.topk_idx; topk_idx && num_local_experts != 0) {
    check_tensor("topk_idx", *topk_idx, device, {DType::int32, DType::int64}, {tokens, kAnySize});
    check_range("width of topk_idx", topk_idx->size(1), 1, kMaxTopk);
    sent.topk_idx = indices_of(*topk_idx);
    sent.topk_weights = checked_memory<float>("topk_weights", arguments.topk_weights, device, DType::float32,
                                              {tokens, topk_idx->size(1)});
    shape.num_topk = static_cast<int>(topk_idx->size(1));
    shape.topk_idx_is_64_bit = sent.topk_idx.is_64_bit;
  }
  return sent;
}

std::size_t plan_stages(PipeShape& pipe, int warps, std::size_t row_bytes, std::size_t room, std::size_t before) {
  constexpr int kMost = 8;
  const auto bytes = [&] { return align_to_line(before) + WarpStages{Carver::without_memory(), warps, pipe}.bytes; };
  pipe = {kMost, 0};
  const std::size_t of_warp = (room - bytes()) / static_cast<std::size_t>(warps);
  const std::size_t row = align_to_line(row_bytes);
  pipe.stages = static_cast<int>(std::clamp<std::size_t>(of_warp / row, 2, kMost));
  pipe.stage_bytes = static_cast<std::uint32_t>(std::min(row, of_warp / 2 / kLine * kLine));
  return bytes();
}

CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, void* sums_pointer,
                        void* weights_pointer, const CallScope& scope) {
  CombineResult result;
  WantedTensors wanted(x.device);
  wanted.add(result.combined_x, sums_pointer, DType::bfloat16, {tokens, x.size(1)});
  wanted.begin_piece();
  if (weights != 0) {
    wanted.add(result.combined_topk_weights.emplace(), weights_pointer, DType::float32, {tokens, weights});
  }
  scope.make_results(wanted);
  return result;
}

HostCounts* NormalMode::counts_for_host(bool exact, const CallScope& scope) const {
  if (!exact) return nullptr;
  if (scope.recording()) {
    throw InvalidArgument(
        "num_worst_tokens is 0, but the stream records a CUDA graph: the host cannot wait for sizes then (a cached "
        "dispatch needs none)");
  }
  __atomic_store_n(&host_counts->epoch, 0, __ATOMIC_RELEASE);
  return host_counts.get();
}

std::vector<int> NormalMode::wait_for_counts(int experts, CallScope& scope) const {
  const HostCounts& counts = *host_counts;
  Faults& faults = runtime.faults();
  const double timeout_s = runtime.timeout_s();
  // The kernel has the real deadline, and says for which rank it waited. Ours is for a kernel that never started.
  const Deadline deadline(timeout_s == 0 ? 0 : timeout_s * 2 + 10);
  const Backoff backoff;
  const bool on_cpu = !runtime.on_gpu();
  for (std::uint64_t spins = 1; __atomic_load_n(&counts.epoch, __ATOMIC_ACQUIRE) == 0 && !faults.met(); ++spins) {
    if (spins % (on_cpu ? 64 : 4096) != 0) continue;
    if (on_cpu) std::this_thread::sleep_for(backoff.nap());  // the kernel needs the processor
    if (InterruptScope::wanted()) {
      scope.abandon();  // so that its kernel is waited for
      faults.break_by_interruption();
    }
    if (deadline.expired()) {
      runtime.calls().settle_soon();
      faults.break_by<TimeoutError>(
          fmt::format("rank {}: no counts of a dispatch arrived within {} s, and no kernel says why: "
                      "earlier work on the stream has not ended, or the GPU is lost",
                      runtime.rank(), deadline.seconds()));
    }
  }
  // Notes wait for the next call: the counts are exchanged, and the peers expect our rows.
  if (faults.met()) {
    scope.abandon();  // so that raise waits for the kernel
    faults.raise();
  }
  return {counts.tokens_per_expert, counts.tokens_per_expert + experts};
}

NormalMode& BufferCall::normal(bool moves_tokens) const {
  if (runtime_.only_low_latency_) {
    fail<Unsupported>("Buffer::{} after ranks were replaced, allowed: low-latency calls", name_);
  }
  if (moves_tokens && runtime_.layout().window_bytes == 0) {
    fail<InvalidArgument>("Buffer::{} needs a window, but the buffer's heap_bytes is {}: see Buffer::heap_bytes_hint",
                          name_, runtime_.options().heap_bytes);
  }
  const NodeMembership& nodes = runtime_.nodes();
  if (nodes.num_nodes == 1 || runtime_.normal_mode->rails()) return *runtime_.normal_mode;
  fail<InvalidArgument>(
      "Buffer::{} needs nodes of equally many consecutive ranks, but the {} ranks are of {} nodes that are not", name_,
      runtime_.num_ranks(), nodes.num_nodes);
}

NormalMode::NormalMode(Runtime& of_buffer) : runtime(of_buffer) {
  common.rank = runtime.rank();
  common.num_ranks = runtime.num_ranks();
  common.control = runtime.layout().control;
  common.grid = runtime.plan().grid;
  if (common.grid.others() != 0) {
    common.lanes = runtime.options().internode.lanes;
    common.peers = runtime.connections(BufferPlan::kNormalMode).device_peers();
  }
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const auto experts = static_cast<std::size_t>(runtime.options().max_local_experts);
  host_counts = pinned_memory<HostCounts>(runtime.executor(), sizeof(HostCounts) + sizeof(std::int32_t) * experts);
  state_ = runtime.zeroed_memory<KernelState>();
  // Ranks, experts, and nodes, which are at most ranks.
  layout_work_ =
      runtime.zeroed_memory<LayoutWork>(sizeof(LayoutWork) + sizeof(std::int32_t) * (ranks + ranks * experts + ranks));
  common.heaps = runtime.heap()->device_peers();
  common.state = state_.get();
  common.wait = runtime.faults().wait_context();
  if (!rails()) return;
  rail_states_ = runtime.zeroed_memory<RailState>(static_cast<std::size_t>(common.grid.others()) * sizeof(RailState));
  common.rails = rail_states_.get();
}

std::string NormalMode::describe() const {
  const bool one_node = runtime.nodes().num_nodes == 1;
  if (!one_node && !rails()) return "normal mode: not between nodes that are not all of equally many consecutive ranks";
  const std::string way =
      one_node ? "" : ", between nodes by " + runtime.connections(BufferPlan::kNormalMode).describe();
  return fmt::format("normal mode: dispatch on {} SMs, combine on {}, of {}, where a call does not say{}",
                     runtime.sms(0, defaults::kDispatchSms), runtime.sms(0, defaults::kCombineSms),
                     runtime.policy().multiprocessors, way);
}

void NormalMode::check_handle(const DispatchHandle* handle, std::int64_t tokens) const {
  if (handle == nullptr || !handle->destination_row.defined()) {
    throw InvalidArgument("handle is missing or empty, allowed: that of the dispatch whose rows come back or go again");
  }
  check_tensor("handle.rank_prefix_matrix", handle->rank_prefix_matrix.view(), runtime.device(), {DType::int32},
               {common.num_ranks, common.grid.width});
  if (tokens == kAnySize || handle->num_tokens() == tokens) return;
  fail<InvalidArgument>("x has {} rows, the handle's dispatch had {}", tokens, handle->num_tokens());
}

DispatchLayout Buffer::get_dispatch_layout(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call) {
  const BufferCall in(runtime_, "get_dispatch_layout");
  const int num_ranks = in->num_ranks();
  check_tensor("topk_idx", topk_idx, in->device(), {DType::int32, DType::int64}, {kAnySize, kAnySize});
  check_token_count("number of tokens", topk_idx.size(0), in->nodes());
  check_range("width of topk_idx", topk_idx.size(1), 0, INT32_MAX);
  check_experts("num_experts", num_experts, num_ranks, in->options().max_local_experts);
  CallScope scope = in->begin(call);
  DispatchLayout layout = in->normal_mode->count(topk_idx, num_experts, scope);
  layout.event = scope.finish();
  return layout;
}

DispatchLayout NormalMode::count(const ConstTensorView& topk_idx, int num_experts, const CallScope& scope) const {
  const LaunchPolicy& policy = runtime.policy();
  LayoutParams params{};
  params.topk_idx = indices_of(topk_idx);
  params.num_tokens = static_cast<int>(topk_idx.size(0));
  params.num_topk = static_cast<int>(topk_idx.size(1));
  params.num_experts = num_experts;
  params.num_ranks = common.num_ranks;
  params.ranks_per_node = common.grid.width;
  params.num_nodes = rails() ? common.grid.nodes() : 0;
  params.columns = params.num_ranks + params.num_nodes;
  params.work = layout_work_.get();

  DispatchLayout layout;
  WantedTensors wanted(runtime.device());
  wanted.add(layout.num_tokens_per_rank, &params.num_tokens_per_rank, DType::int32, {params.num_ranks});
  wanted.add(layout.num_tokens_per_expert, &params.num_tokens_per_expert, DType::int32, {num_experts});
  wanted.add(layout.is_token_in_rank, &params.is_token_in_rank, DType::boolean, {params.num_tokens, params.num_ranks});
  if (params.num_nodes != 0) {
    wanted.add(layout.num_tokens_per_node, &params.num_tokens_per_node, DType::int32, {params.num_nodes});
  }
  scope.make_results(wanted);
  const int threads = std::min(256, policy.warps_per_block * 32);
  const int blocks = (params.num_tokens * params.num_ranks - 1) / threads + 1;
  runtime.launch(choices::layout, params,
                 {std::clamp(blocks, 1, policy.multiprocessors), threads,
                  static_cast<std::size_t>(params.counters()) * sizeof(std::int32_t)},
                 scope);
  return layout;
}

DispatchResult Buffer::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "dispatch");
  const NormalMode& mode = in.normal();
  const bool fresh = arguments.handle == nullptr;
  const SentRows rows = sent_rows(arguments, fresh ? num_experts(arguments) / in->num_ranks() : 0, *runtime_);
  fresh ? check_layout(arguments, *runtime_) : mode.check_handle(arguments.handle, rows.num_tokens);
  CallScope scope = in->begin(call);
  DispatchResult result = mode.dispatch(arguments, rows, scope);
  NormalMode::hand_out(result.handle, scope);
  result.event = scope.finish();
  return result;
}

DispatchResult NormalMode::dispatch(const DispatchArguments& arguments, const SentRows& rows, CallScope& scope) const {
  const bool fresh = arguments.handle == nullptr, exact = fresh && arguments.num_worst_tokens == 0;
  const int width = common.grid.width;
  DispatchParams params{};
  static_cast<SentRows&>(params) = rows;
  const RowShape& shape = params.rows;
  TransferParams& transfer = params.transfer = transfer_params(PackedRow::bytes(shape, width), true, *this);
  if (rails()) require_slots(transfer.local, *this);  // known before rows are counted
  DispatchResult result;
  DispatchHandle& handle = result.handle;
  if (!fresh) handle = *arguments.handle;
  // Memory for the worst case is made before the exchange: it may throw, and no peer counts on this rank yet.
  const std::int64_t most = fresh ? arguments.num_worst_tokens : handle.num_recv_rows;
  bool in_heap = !exact && make_room(arguments, params, result, most, most * width, scope);
  if (fresh) {
    NotifyParams counting{};
    counting.shape = call_shape(arguments, num_experts(arguments));
    counting.num_tokens = rows.num_tokens;
    counting.num_local_experts = rows.num_local_experts;
    counting.expert_alignment = arguments.expert_alignment;
    counting.is_token_in_rank = arguments.is_token_in_rank.as<std::uint8_t>();
    counting.num_tokens_per_expert = arguments.num_tokens_per_expert.as<std::int32_t>();
    counting.host_counts = counts_for_host(exact, scope);
    exchange_counts(counting, handle, *this, scope);
  }
  if (exact) {
    result.num_recv_tokens_per_expert = wait_for_counts(rows.num_local_experts, scope);
    in_heap = make_room(arguments, params, result, host_counts->num_recv_tokens, host_counts->num_relay_rows, scope);
  }

  set_handle(transfer, handle, true);
  transfer.shape = shape_of({0, shape.row_bytes, shape.num_scales, shape.num_topk});
  // Peers write rows into place in the heap. Elsewhere they are copied from the window, if it holds all, or pass
  // through local rings in it.
  const RowTargets places = params.output;
  Carver window(runtime.window());
  const RowTargets in_window = RowTargets::carve(window, shape, static_cast<std::size_t>(params.output_rows));
  const bool lands = !in_heap && !rails() && window.bytes() <= runtime.layout().window_bytes;
  const bool fetches = !in_heap && !lands;
  if (lands) params.output = in_window;
  if (fetches) require_slots(transfer.local, *this);
  int blocks = runtime.sms(arguments.num_sms, defaults::kDispatchSms);
  const auto kernel = rails() ? choices::dispatch_and_notify_internode : choices::dispatch;
  const int warps = rails() ? runtime.warps(kernel.max_threads) : runtime.policy().warps_per_block;
  plan_warps(transfer, blocks, warps, fetches ? 1 : 0);
  if (!rails() && !fetches) blocks = std::clamp((params.num_tokens + warps - 1) / warps, 1, blocks);
  const std::size_t shared_bytes =
      plan_stages(transfer.pipe, transfer.moving_warps(), shape.row_bytes, runtime.policy().max_shared_bytes,
                  DispatchShared{{Carver::without_memory(), transfer}}.pipes.bytes);
  runtime.launch(kernel, params, {blocks, transfer.warps() * 32, shared_bytes}, scope);
  scope.begins();
  if (lands) copy_received(params, places, runtime, scope);
  if (!arguments.topk_weights) result.recv_topk_weights.reset();
  return result;
}

void NormalMode::hand_out(const DispatchHandle& handle, const CallScope& scope) {
  scope.hand_out({&handle.recv_src_idx, &handle.destination_row, &handle.rank_prefix_matrix, &handle.relay_rows});
}

CombineResult Buffer::combine(const CombineArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "combine");
  const NormalMode& mode = in.normal();
  mode.check_handle(arguments.handle);
  const DispatchHandle& handle = *arguments.handle;
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  check_tensor("x", x, in->device(), {DType::bfloat16}, {handle.num_recv_rows, kAnySize});
  check_row_bytes("x", x);
  if (weights) {
    check_tensor("topk_weights", *weights, in->device(), {DType::float32}, {handle.num_recv_rows, kAnySize});
    check_range("width of topk_weights", weights->size(1), 1, kMaxTopk);
  }
  check_biases(arguments, handle.num_tokens(), *runtime_);
  check_sms(arguments.num_sms);

  CallScope scope = in->begin(call);
  CombineParams params{};
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = weights ? static_cast<int>(weights->size(1)) : 0;
  params.transfer =
      transfer_params(params.row_bytes + static_cast<std::size_t>(params.num_topk) * sizeof(float), false, mode);
  set_handle(params.transfer, handle, false);
  params.transfer.shape = shape_of({1, params.row_bytes, params.num_topk});
  set_biases(params, arguments);
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  CombineResult result =
      make_sums(x, handle.num_tokens(), params.num_topk, &params.combined_x, &params.combined_weights, scope);
  // The other ranks of the node read rows in the heap. Others are copied there, if it has room; else pushed.
  std::vector<Tensor> copies;  // until the call is enqueued: their memory is reused behind it
  bool pushes = false;
  const auto readable = [&](const ConstTensorView& tensor, auto copy) -> const void* {
    if (tensor.size(0) == 0) return in->heap()->local();  // nothing to read; frameworks give it no address
    if (pushes || in->in_heap(tensor) || mode.common.grid.width == 1) return tensor.data;
    const TensorView wanted = unplaced(in->device(), tensor.dtype, {tensor.size(0), tensor.size(1)});
    const auto made = scope.tensors({&wanted, 1}, true);
    pushes = made.empty();
    if (pushes) return tensor.data;
    copy(static_cast<std::byte*>(copies.emplace_back(made.front()).data()));
    return copies.back().data();
  };
  params.x = x.as<std::byte>();
  params.shared_x =
      static_cast<const std::byte*>(readable(x, [&](std::byte* to) { copy_for_peers(params, to, *runtime_, scope); }));
  if (weights) {
    params.topk_weights = static_cast<const float*>(readable(
        *weights, [&](std::byte* to) { in->executor()->copy(to, weights->data, weights->bytes(), scope.stream()); }));
  }
  // In one node also where this rank does not push: its peers may.
  if (pushes || !mode.rails()) require_slots(params.transfer.local, mode);
  TransferParams& transfer = params.transfer;
  const int blocks = in->sms(arguments.num_sms, defaults::kCombineSms);
  const auto kernel = mode.rails() ? choices::combine_and_notify_internode : choices::combine;
  const int warps = in->warps(kernel.max_threads);
  plan_warps(transfer, blocks, warps, !pushes ? 0 : mode.rails() ? 1 : std::max(1, warps / 2));
  // A warp that adds a whole token looks its rows up once, and keeps most pieces of them under way; where a warp gets
  // few tokens, all warps end at the same time only if tokens are cut. A row whose slot is used again is released by
  // one warp, which has added all of it.
  constexpr int kTokensOfWarp = 20;
  const bool cut = !mode.rails() && transfer.num_tokens <= transfer.local.slots;
  const int many = kTokensOfWarp * blocks * transfer.first_warps;
  params.parts_per_token = !cut || transfer.num_tokens >= many ? 1 : 2 * transfer.num_tokens >= many ? 2 : 4;
  const std::size_t shared_bytes = NormalCombineShared{Carver::without_memory(), transfer}.bytes;
  in->launch(kernel, params, {blocks, transfer.warps() * 32, shared_bytes}, scope);
  scope.begins();
  result.event = scope.finish();
  return result;
}

EventHandle Buffer::barrier(const CallOptions& call) {
  const BufferCall in(runtime_, "barrier");
  const NormalMode& mode = in.normal(false);
  CallScope scope = in->begin(call);
  if (!mode.rails()) {
    in->launch(choices::barrier, mode.common, {1, in->warps(choices::barrier.max_threads) * 32}, scope);
    scope.begins();
    return scope.finish();
  }
  // Counts of all ranks are exchanged, though there are none.
  NotifyParams nothing{};
  DispatchHandle tables;
  exchange_counts(nothing, tables, mode, scope);
  return scope.finish();
}

}  // namespace deep_ep
