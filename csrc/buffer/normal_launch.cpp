// Launches of normal mode: rings in the window, roles of warps, and the kernels that move rows.
#include <algorithm>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/normal/combine_push.hpp"

namespace deep_ep {
namespace {

/// TransferParams::shape, of a kind of call and of what its rows are made of.
std::uint32_t shape_of(std::initializer_list<std::uint32_t> numbers) {
  std::uint32_t shape = 1;
  for (const std::uint32_t number : numbers) shape = combine_shapes(shape, number);
  return shape;
}

/// The window as a place for all rows at once, if it has room for them.
std::optional<RowTargets> whole_window(std::byte* window, std::int64_t rows, const RowShape& shape,
                                       const Runtime& runtime) {
  constexpr std::size_t kPadding = RowTargets::kParts * kLine;
  const auto count = static_cast<std::size_t>(rows);
  const std::size_t bytes = runtime.layout().window_bytes;
  if (bytes < kPadding || (bytes - kPadding) / shape.all_bytes() < count) return std::nullopt;
  return RowTargets::carve(Carver(window), shape, count);
}

/// Copies rows that have landed in the window to the results.
void copy_received(const DispatchParams& sent, const RowTargets& to, const Runtime& runtime, StreamHandle stream) {
  const NormalParams& common = sent.transfer.common;
  const RowTargets& from = sent.output;
  const RowShape& shape = sent.rows;
  SpreadRowsParams params{};
  params.metadata.num_rows = params.num_spread = sent.output_rows;
  params.metadata.num_valid =
      sent.transfer.rank_prefix_matrix + (common.num_ranks - 1) * common.num_ranks + common.rank;
  params.abort = sent.transfer.wait.abort;
  params.rows = from.x;
  params.spread_rows = to.x;
  params.row_bytes = shape.row_bytes;
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
  params.kept[2] = words(to.topk_weights, from.topk_weights, shape.topk_weight_bytes());
  const LaunchShape all = plan_spreading(params, runtime.executor()->policy());
  runtime.executor()->kernels().spread_rows(params, all, stream);
}

/// The roles of a block's `warps` warps between nodes. `fewest_local`: of local warps; 0 if this rank's rows lie in the
/// heap.
void plan_rail_warps(TransferParams& params, int blocks, int warps, int fewest_local) {
  params.poster_warps = (params.common.grid.others() * params.common.lanes + 32 * blocks - 1) / (32 * blocks);
  const int rest = std::max(2 + fewest_local, warps - params.poster_warps);
  params.local_warps = fewest_local == 0 ? 0 : std::max(fewest_local, rest / 4);
  params.first_warps = (rest - params.local_warps) / 2;
  params.second_warps = rest - params.local_warps - params.first_warps;
}

/// The roles in one node. `fetches`: some warps take this rank's rows out of its local rings. Returns how many blocks
/// there are.
int plan_warps(DispatchParams& params, int sms, const Runtime& runtime, bool fetches) {
  const int warps = std::max(runtime.policy().warps_per_block, fetches ? 2 : 1);
  params.transfer.local_warps = fetches ? std::max(1, warps / 4) : 0;
  params.transfer.first_warps = warps - params.transfer.local_warps;
  return fetches ? sms : std::min(sms, std::max(1, (params.num_tokens + warps - 1) / warps));
}

// About 32 pushing warps in all saturate NVLink; more get in each other's way (results/measurements/). Few blocks have
// more of them each, but not so many that too few warps are left to add.
constexpr int kGpuPushingWarpsInAll = 32;
constexpr int kGpuFewestPushingWarps = 2;
constexpr int kGpuMostPushingWarps = 4;

/// In how many parts each of the tokens is added, by so many warps. A warp that adds a whole token looks its rows up
/// once, and keeps most pieces of them under way; where a warp gets few tokens, all warps end at the same time only if
/// tokens are cut.
int parts_per_token(int tokens, int warps) {
  constexpr int kTokensOfWarp = 20;
  if (tokens >= kTokensOfWarp * warps) return 1;
  return 2 * tokens >= kTokensOfWarp * warps ? 2 : 4;
}

/// The roles of the warps of each of `blocks` blocks, in one node. If this rank pushes, one raises the words of pushed
/// rows, and the others share adding and pushing.
void plan_warps(CombineParams& params, int blocks, const Runtime& runtime, bool pushes) {
  const bool gpu = runtime.on_gpu();
  const int raising = pushes ? 1 : 0;
  const int rest = std::max(runtime.warps(kernels::combine::kMaxThreads) - raising, pushes ? 2 : 1);
  const int share =
      std::clamp((kGpuPushingWarpsInAll + blocks - 1) / blocks, kGpuFewestPushingWarps, kGpuMostPushingWarps);
  const int pushing = !pushes ? 0 : gpu ? share : std::max(1, rest / 3);
  const int adding = rest - pushing;
  TransferParams& transfer = params.transfer;
  transfer.first_warps = adding;
  transfer.local_warps = pushing + raising;
  // A row whose slot is used again is released by one warp, which has added all of it.
  const bool release = transfer.num_tokens > transfer.local.slots;
  params.parts_per_token = release ? 1 : parts_per_token(transfer.num_tokens, blocks * adding);
  params.pushing_blocks = gpu ? std::max(1, kGpuPushingWarpsInAll / std::max(1, pushing)) : INT32_MAX;
}

}  // namespace

Rings NormalMode::rings_for(std::size_t row_bytes) const {
  const HeapLayout& layout = runtime_.layout();
  const std::size_t bytes = layout.window_bytes - LocalRings::bytes_of(layout.window_bytes);
  const Rings rings = Rings::make(layout.window_at(), bytes, common_.grid.others(), row_bytes);
  if (rings.chunks != 0) return rings;
  fail<OutOfMemory>(
      "the window of {} does not hold two rows of {} to and from each of the {} other nodes: raise heap_bytes or "
      "window_bytes",
      format_bytes(layout.window_bytes), format_bytes(row_bytes), common_.grid.others());
}

LocalRings NormalMode::local_rings_for(std::size_t row_bytes, bool dispatches) const {
  const HeapLayout& layout = runtime_.layout();
  const std::size_t bytes = rails() ? LocalRings::bytes_of(layout.window_bytes) : layout.window_bytes;
  const std::size_t begin = layout.window_at() + layout.window_bytes - bytes;
  const int ranks = common_.num_ranks;
  if (!dispatches) {
    return LocalRings::make(begin, bytes, ranks, ranks, row_bytes, common_.control.pushed_rows(), Wanted::combine_rows,
                            Wanted::combine_credit);
  }
  return LocalRings::make(begin, bytes, common_.grid.width, ranks, row_bytes, common_.control.fetched_rows(),
                          Wanted::dispatch_rows, Wanted::dispatch_credit);
}

void NormalMode::require_slots(const LocalRings& rings, int ranks) const {
  if (rings.slots != 0) return;
  fail<OutOfMemory>(
      "rows outside the heap of {} go through {} of {}, which does not hold a row of {} from each of {} ranks: raise "
      "heap_bytes or window_bytes",
      format_bytes(runtime_.heap()->bytes()), rails() ? "a quarter of its window" : "its window",
      format_bytes(runtime_.layout().window_bytes), format_bytes(rings.slot_bytes), ranks);
}

void NormalMode::check_room(const RowShape& rows) const {
  if (!rails()) return;  // only rows outside the heap need room
  const std::size_t bytes = PackedRow::bytes(rows, common_.grid.width);
  static_cast<void>(rings_for(bytes));
  require_slots(local_rings_for(bytes, true), common_.grid.width);
}

TransferParams NormalMode::transfer_params(const DispatchHandle& handle, std::size_t row_bytes, bool dispatches) const {
  TransferParams params{};
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.local = local_rings_for(row_bytes, dispatches);
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.num_tokens = static_cast<int>(handle.num_tokens);
  if (!rails()) return params;
  params.rings = rings_for(row_bytes);
  const auto* to = handle.node_counts.as<std::int32_t>();
  const auto* from = to + common_.grid.nodes();
  params.counts = dispatches ? NodeCounts{to, from} : NodeCounts{from, to};  // rows go back to where they came from
  params.node_row = handle.node_row.as<std::int32_t>();
  params.relay_rows_room = handle.relay_rows.view().size(0);
  return params;
}

void NormalMode::send(const SentRows& rows, const Config& config, const DispatchHandle& handle,
                      const DispatchOutputs& outputs, const CallScope& scope) const {
  const RowShape& shape = rows.rows;
  DispatchParams params{};
  static_cast<SentRows&>(params) = rows;
  params.transfer = transfer_params(handle, PackedRow::bytes(shape, common_.grid.width), true);
  params.transfer.shape = shape_of(
      {0, shape.row_bytes, static_cast<std::uint32_t>(shape.num_scales), static_cast<std::uint32_t>(shape.num_topk)});
  params.output = outputs.targets();
  params.output_rows = handle.num_recv_rows;
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  // Peers write rows into place in the heap. Elsewhere they are copied from the window, if it holds all, or pass
  // through local rings in it.
  const std::optional<RowTargets> landed = outputs.in_heap || rails()
                                               ? std::nullopt
                                               : whole_window(runtime_.window(), handle.num_recv_rows, shape, runtime_);
  if (landed) params.output = *landed;
  const bool fetches = !outputs.in_heap && !landed;
  if (fetches) require_slots(params.transfer.local, common_.grid.width);
  launch(params, config, fetches, scope.stream());
  if (landed) copy_received(params, outputs.targets(), runtime_, scope.stream());
}

void NormalMode::launch(DispatchParams& params, const Config& config, bool fetches, StreamHandle stream) const {
  TransferParams& transfer = params.transfer;
  int blocks = runtime_.sms(config, defaults::kDispatchSms);
  const auto kernel = rails() ? choices::dispatch_and_notify_internode : choices::dispatch;
  if (rails()) {
    plan_rail_warps(transfer, blocks, runtime_.warps(kernel.max_threads), fetches ? 1 : 0);
  } else {
    blocks = plan_warps(params, blocks, runtime_, fetches);
  }
  const std::size_t shared_bytes =
      plan_stages(transfer.stages, transfer.stage_bytes, transfer.moving_warps(), params.rows.row_bytes,
                  runtime_.policy().max_shared_bytes, [&](int stages, std::uint32_t stage_bytes) {
                    return DispatchShared(Carver::without_memory(), transfer, blocks, stages, stage_bytes).bytes;
                  });
  (runtime_.executor()->kernels().*kernel.launcher)(params, {blocks, transfer.warps() * 32, shared_bytes}, stream);
}

CombineResult NormalMode::combine(const CombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments);
  runtime_.faults().raise();
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  const DispatchHandle& handle = *arguments.handle;
  CombineParams params{};
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = weights ? static_cast<int>(weights->size(1)) : 0;
  params.transfer =
      transfer_params(handle, params.row_bytes + static_cast<std::size_t>(params.num_topk) * sizeof(float), false);
  params.transfer.shape = shape_of({1, params.row_bytes, static_cast<std::uint32_t>(params.num_topk)});
  set_biases(params, arguments);
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  params.relay_rows = handle.relay_rows.as<std::int32_t>();

  CallScope scope(runtime_.calls(), call);
  CombineResult result = make_sums(x, handle.num_tokens, params.num_topk, scope);
  params.combined_x = result.combined_x.as<std::byte>();
  params.combined_weights = memory_of<float>(result.combined_topk_weights);
  std::vector<Tensor> copies;  // until the call is enqueued: their memory is reused behind it
  bool pushes = false;
  if (x.size(0) == 0) {
    // A rank that received nothing has nothing to read; frameworks give its empty tensors no address.
    params.x = runtime_.heap()->local();
  } else {
    // Ranks of the node read the rows in the heap. Between nodes they are copied there, if it has room; else pushed.
    const auto readable = [&](const ConstTensorView& tensor) {
      if (pushes || runtime_.in_heap(tensor)) return tensor.data;
      if (rails()) {
        const TensorView wanted = unplaced(runtime_.device(), tensor.dtype, {tensor.size(0), tensor.size(1)});
        if (const auto made = scope.try_heap_tensors({&wanted, 1})) {
          void* copy = copies.emplace_back(made->front()).data();
          runtime_.executor()->copy(copy, tensor.data, tensor.bytes(), scope.stream());
          return static_cast<const void*>(copy);
        }
      }
      pushes = true;
      return tensor.data;
    };
    params.x = static_cast<const std::byte*>(readable(x));
    if (weights) params.topk_weights = static_cast<const float*>(readable(*weights));
  }
  // In one node also where this rank does not push: its peers may.
  if (pushes || !rails()) require_slots(params.transfer.local, common_.num_ranks);
  launch(params, arguments.config, pushes, scope.stream());
  result.event = scope.finish();
  return result;
}

void NormalMode::launch(CombineParams& params, const Config& config, bool pushes, StreamHandle stream) const {
  TransferParams& transfer = params.transfer;
  const int blocks = runtime_.sms(config, defaults::kCombineSms);
  const auto kernel = rails() ? choices::combine_and_notify_internode : choices::combine;
  if (rails()) {
    plan_rail_warps(transfer, blocks, runtime_.warps(kernel.max_threads), pushes ? 2 : 0);
    params.parts_per_token = 1;
    params.pushing_blocks = INT32_MAX;
  } else {
    plan_warps(params, blocks, runtime_, pushes);
  }
  const auto shared_bytes = [&](int stages, std::uint32_t stage_bytes) {
    return CombineShared(Carver::without_memory(), transfer, blocks, stages, stage_bytes).bytes;
  };
  if (transfer.local_warps != 0) {  // warps that add work in registers
    plan_stages(transfer.stages, transfer.stage_bytes, transfer.pushing_warps(), params.row_bytes,
                runtime_.policy().max_shared_bytes, shared_bytes);
  }
  (runtime_.executor()->kernels().*kernel.launcher)(
      params, {blocks, transfer.warps() * 32, shared_bytes(transfer.stages, transfer.stage_bytes)}, stream);
}

}  // namespace deep_ep
