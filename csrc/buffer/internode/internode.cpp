#include "csrc/buffer/internode/internode.hpp"

#include <algorithm>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "kernels/internode/dispatch_rows.hpp"

namespace deep_ep {

Internode::Internode(Runtime& runtime)
    : runtime_(runtime),
      grid_(runtime.node_grid()),
      setup_(normal_mode_setup(runtime)),
      connections_(runtime.take_connections(BufferPlan::kNormalMode)) {
  const int lanes = runtime.internode_lanes();
  const auto ranks = static_cast<std::size_t>(grid_.num_ranks);
  const auto others = static_cast<std::size_t>(grid_.others());
  const auto mapped = runtime.heap()->peers();
  std::vector<std::byte*> heaps(ranks, nullptr);
  for (int index = 0; index < grid_.width; ++index) {
    const auto rank = static_cast<std::size_t>(grid_.first_of_node() + index);
    heaps[rank] = mapped[rank];
  }
  agree(runtime.bootstrap(), "allocating memory for calls of normal mode between nodes", [&] {
    const std::size_t counters = others * Rings::kMostChunks;
    state_ = runtime.zeroed_memory<InternodeState>();
    rails_ = runtime.zeroed_memory<RailState>(static_cast<std::size_t>(lanes) * others * sizeof(RailState));
    counters_ = runtime.zeroed_memory<std::uint32_t>((2 * counters + static_cast<std::size_t>(grid_.width)) *
                                                     sizeof(std::uint32_t));
    heaps_ = device_memory<std::byte*>(runtime.executor(), ranks * sizeof(std::byte*));
    host_counts_ = make_host_counts(runtime);
    runtime.executor()->copy(heaps_.get(), heaps.data(), ranks * sizeof(std::byte*), runtime.comm_stream());
    runtime.executor()->synchronize(runtime.comm_stream());
    common_.grid = grid_;
    common_.heaps = heaps_.get();
    common_.window = runtime.layout().internode;
    common_.lanes = lanes;
    common_.peers = connections_->device_peers();
    common_.state = state_.get();
    common_.rails = rails_.get();
    common_.staged = counters_.get();
    common_.read = counters_.get() + counters;
    common_.local_tickets = counters_.get() + 2 * counters;
  });
  log::info("buffer: rank {} in normal mode between nodes: {}", runtime.rank(), describe());
}

std::string Internode::describe() const {
  return common_.lanes == 1 ? connections_->describe()
                            : fmt::format("{} lanes, {}", common_.lanes, connections_->describe());
}

Rings Internode::rings_for(std::size_t row_bytes) const {
  const std::size_t bytes = setup_.window_bytes - LocalRings::bytes_of(setup_.window_bytes);
  const Rings rings = Rings::make(runtime_.layout().window_at(), bytes, grid_.others(), row_bytes, common_.lanes);
  if (rings.chunks == 0) {
    fail<OutOfMemory>(
        "the window of {} does not hold two rows of {} to and from each of the {} other nodes: raise heap_bytes or "
        "window_bytes",
        format_bytes(setup_.window_bytes), format_bytes(row_bytes), grid_.others());
  }
  return rings;
}

LocalRings Internode::local_rings_for(const Rings& rings, int count) const {
  const std::size_t bytes = LocalRings::bytes_of(setup_.window_bytes);
  return LocalRings::make(runtime_.layout().window_at() + setup_.window_bytes - bytes, bytes, count, grid_.num_ranks,
                          rings.slot_bytes);
}

void Internode::check_room_for_dispatch(const RowShape& rows) const {
  const Rings rings = rings_for(PackedRow::bytes(rows, grid_.width));
  if (local_rings_for(rings, grid_.width).slots != 0) return;
  fail<OutOfMemory>(
      "a quarter of the window of {} does not hold a row of {} from each of the {} ranks of the node: raise heap_bytes "
      "or window_bytes",
      format_bytes(setup_.window_bytes), format_bytes(rings.slot_bytes), grid_.width);
}

TransferParams Internode::transfer(const DispatchHandle& handle, std::size_t row_bytes, int local_rings) const {
  TransferParams params{};
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.rings = rings_for(row_bytes);
  params.local = local_rings_for(params.rings, local_rings);
  const auto* counts = handle.node_counts.as<std::int32_t>();
  params.counts = {counts, counts + grid_.nodes()};
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.node_row = handle.node_row.as<std::int32_t>();
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.relay_rows_room = handle.relay_rows.view().size(0);
  return params;
}

std::uint32_t Internode::shape_of(std::initializer_list<std::uint32_t> numbers) {
  std::uint32_t shape = 1;
  for (const std::uint32_t number : numbers) shape = combine_shapes(shape, number);
  return shape;
}

int Internode::plan_warps(TransferParams& params, const Config& config, int blocks, int most, bool outside_heap) const {
  const int wanted = config.warps_per_block != 0 ? config.warps_per_block
                     : setup_.on_gpu()           ? most
                                                 : setup_.policy.warps_per_block;
  params.poster_warps = (grid_.others() * common_.lanes + 32 * blocks - 1) / (32 * blocks);
  const int rest = std::max(outside_heap ? 3 : 2, std::min(wanted, most) - params.poster_warps);
  params.local_warps = outside_heap ? std::max(1, rest / 4) : 0;
  params.first_warps = (rest - params.local_warps) / 2;
  params.second_warps = rest - params.local_warps - params.first_warps;
  return rest + params.poster_warps;
}

void Internode::check_handle(const DispatchHandle& handle) const {
  if (handle.node_row.defined() && handle.node_counts.defined() && handle.relay_rows.defined() &&
      handle.node_row.size(1) == grid_.nodes()) {
    return;
  }
  fail<InvalidArgument>("handle is not of a dispatch between {} nodes", grid_.nodes());
}

}  // namespace deep_ep
