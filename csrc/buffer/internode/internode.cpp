#include "csrc/buffer/internode/internode.hpp"

#include <algorithm>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/defaults.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {
namespace {

/// TransferParams::shape, of a kind of call and of what its rows are made of.
std::uint32_t shape_of(std::initializer_list<std::uint32_t> numbers) {
  std::uint32_t shape = 1;
  for (const std::uint32_t number : numbers) shape = combine_shapes(shape, number);
  return shape;
}

}  // namespace

Internode::Internode(Runtime& runtime)
    : NormalMode(runtime), grid_(runtime.node_grid()), connections_(runtime.take_connections(BufferPlan::kNormalMode)) {
  const int lanes = runtime.internode_lanes();
  const auto others = static_cast<std::size_t>(grid_.others());
  agree(runtime.bootstrap(), "allocating memory for calls of normal mode between nodes", [&] {
    const std::size_t counters = others * Rings::kMostChunks;
    allocate();
    rails_ = runtime.zeroed_memory<RailState>(others * sizeof(RailState));
    sent_ = runtime.zeroed_memory<std::uint64_t>(counters * sizeof(std::uint64_t));
    counters_ = runtime.zeroed_memory<std::uint32_t>((2 * counters + static_cast<std::size_t>(grid_.width)) *
                                                     sizeof(std::uint32_t));
    heaps_ = runtime.table_of_heaps([&](int rank) { return rank / grid_.width == grid_.node(); });
    common_.grid = grid_;
    common_.heaps = heaps_.get();
    common_.window = runtime.layout().internode;
    common_.lanes = lanes;
    common_.peers = connections_->device_peers();
    common_.rails = rails_.get();
    common_.staged = counters_.get();
    common_.read = counters_.get() + counters;
    common_.sent = sent_.get();
    common_.local_tickets = counters_.get() + 2 * counters;
  });
  log::info("buffer: rank {} in normal mode between nodes: {}", runtime.rank(), describe());
}

std::string Internode::describe() const {
  return common_.lanes == 1 ? connections_->describe()
                            : fmt::format("{} lanes, {}", common_.lanes, connections_->describe());
}

Rings Internode::rings_for(std::size_t row_bytes) const {
  const std::size_t bytes = runtime_.layout().window_bytes - LocalRings::bytes_of(runtime_.layout().window_bytes);
  const Rings rings = Rings::make(runtime_.layout().window_at(), bytes, grid_.others(), row_bytes);
  if (rings.chunks == 0) {
    fail<OutOfMemory>(
        "the window of {} does not hold two rows of {} to and from each of the {} other nodes: raise heap_bytes or "
        "window_bytes",
        format_bytes(runtime_.layout().window_bytes), format_bytes(row_bytes), grid_.others());
  }
  return rings;
}

LocalRings Internode::local_rings_for(const Rings& rings, bool dispatches) const {
  const std::size_t bytes = LocalRings::bytes_of(runtime_.layout().window_bytes);
  const std::size_t begin = runtime_.layout().window_at() + runtime_.layout().window_bytes - bytes;
  if (dispatches) {
    return LocalRings::make(begin, bytes, grid_.width, grid_.num_ranks, rings.slot_bytes,
                            common_.control.fetched_rows(), Wanted::dispatch_rows, Wanted::dispatch_credit);
  }
  return LocalRings::make(begin, bytes, grid_.num_ranks, grid_.num_ranks, rings.slot_bytes,
                          common_.control.pushed_rows(), Wanted::combine_rows, Wanted::combine_credit);
}

void Internode::check_room(const RowShape& rows) const {
  const Rings rings = rings_for(PackedRow::bytes(rows, grid_.width));
  if (local_rings_for(rings, true).slots != 0) return;
  fail<OutOfMemory>(
      "a quarter of the window of {} does not hold a row of {} from each of the {} ranks of the node: raise heap_bytes "
      "or window_bytes",
      format_bytes(runtime_.layout().window_bytes), format_bytes(rings.slot_bytes), grid_.width);
}

void Internode::set_rings(TransferParams& params, const DispatchHandle& handle, std::size_t row_bytes,
                          bool dispatches) const {
  params.rings = rings_for(row_bytes);
  params.local = local_rings_for(params.rings, dispatches);
  const auto* counts = handle.node_counts.as<std::int32_t>();
  params.counts = {counts, counts + grid_.nodes()};
  params.node_row = handle.node_row.as<std::int32_t>();
  params.relay_rows_room = handle.relay_rows.view().size(0);
}

void Internode::plan_warps(TransferParams& params, const Config& config, int blocks, int most, int fewest_local) const {
  const int wanted = config.warps_per_block != 0 ? config.warps_per_block
                     : runtime_.on_gpu()         ? most
                                                 : runtime_.policy().warps_per_block;
  params.poster_warps = (grid_.others() * common_.lanes + 32 * blocks - 1) / (32 * blocks);
  const int rest = std::max(2 + fewest_local, std::min(wanted, most) - params.poster_warps);
  params.local_warps = fewest_local == 0 ? 0 : std::max(fewest_local, rest / 4);
  params.first_warps = (rest - params.local_warps) / 2;
  params.second_warps = rest - params.local_warps - params.first_warps;
}

void Internode::check_handle(const DispatchHandle& handle) const {
  if (handle.node_row.defined() && handle.node_counts.defined() && handle.relay_rows.defined() &&
      handle.node_row.size(1) == grid_.nodes()) {
    return;
  }
  fail<InvalidArgument>("handle is not of a dispatch between {} nodes", grid_.nodes());
}

void Internode::launch(DispatchParams& params, const Config& config, const DispatchHandle& handle,
                       const DispatchOutputs& outputs, const CallScope& scope) {
  set_rings(params.transfer, handle, PackedRow::bytes(params.rows, grid_.width), true);
  params.transfer.shape = shape_of({0, params.rows.row_bytes, static_cast<std::uint32_t>(params.rows.num_scales),
                                    static_cast<std::uint32_t>(params.rows.num_topk)});
  const int blocks = runtime_.sms(config, defaults::kDispatchSms);
  const int most_warps = kernels::dispatch_and_notify_internode::kMaxThreads / 32;
  plan_warps(params.transfer, config, blocks, most_warps, outputs.in_heap ? 0 : 1);
  enqueue(params, blocks, scope);
}

std::optional<Tensor> Internode::copy_in_heap(const ConstTensorView& tensor, const CallScope& scope) const {
  const TensorView wanted = unplaced(runtime_.device(), tensor.dtype, {tensor.size(0), tensor.size(1)});
  const auto made = scope.try_heap_tensors({&wanted, 1});
  if (!made) return std::nullopt;
  runtime_.executor()->copy(made->front().view().data, tensor.data, tensor.bytes(), scope.stream());
  return made->front();
}

void Internode::launch(CombineParams& params, const CombineArguments& arguments, const CallScope& scope) {
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  set_rings(params.transfer, *arguments.handle,
            params.row_bytes + static_cast<std::size_t>(params.num_topk) * sizeof(float), false);
  params.parts_per_token = 1;
  params.pushing_blocks = INT32_MAX;
  params.transfer.shape = shape_of({1, params.row_bytes, static_cast<std::uint32_t>(params.num_topk)});
  // Rows that came from a node go back to it.
  std::swap(params.transfer.counts.to_node, params.transfer.counts.from_node);
  std::vector<Tensor> copies;  // until the call is enqueued: their memory is reused behind it
  bool pushed = false;
  if (x.size(0) != 0) {
    // Ranks of the node read the rows in the heap. If it has no room for them, they are pushed.
    const auto readable = [&](const ConstTensorView& tensor) {
      if (pushed || runtime_.in_heap(tensor)) return tensor.data;
      const std::optional<Tensor> copy = copy_in_heap(tensor, scope);
      if (!copy) {
        pushed = true;
        return tensor.data;
      }
      copies.push_back(*copy);
      return static_cast<const void*>(copy->view().data);
    };
    params.x = static_cast<const std::byte*>(readable(x));
    if (weights) params.topk_weights = static_cast<const float*>(readable(*weights));
  }
  if (pushed && params.transfer.local.slots == 0) {
    fail<OutOfMemory>(
        "x or topk_weights lies outside the heap, where ranks of the node cannot read it; a heap of {} has no room for "
        "a copy of {}, and a quarter of its window of {} does not hold a row of {} for each of the {} ranks: raise "
        "heap_bytes or window_bytes, or make x by allocate_tensor",
        format_bytes(runtime_.heap()->bytes()), format_bytes(x.bytes() + (weights ? weights->bytes() : 0)),
        format_bytes(runtime_.layout().window_bytes), format_bytes(params.transfer.local.slot_bytes),
        runtime_.num_ranks());
  }

  const int blocks = runtime_.sms(arguments.config, defaults::kCombineSms);
  const int most_warps = kernels::combine_and_notify_internode::kMaxThreads / 32;
  plan_warps(params.transfer, arguments.config, blocks, most_warps, pushed ? 2 : 0);
  enqueue(params, blocks, scope);
}

}  // namespace deep_ep
