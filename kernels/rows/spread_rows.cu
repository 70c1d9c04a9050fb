// The kernel writes received rows into a layout. They lie one after the other, or where their senders have put them. A
// warp reads a row once, by a bulk copy into shared memory, and each lane stores it by a bulk copy to its selection's
// place; the next row loads meanwhile. Rows that no selection names are neither read nor written.
#include "kernels/common/row_copy.hpp"
#include "kernels/common/row_pipe.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// By a whole warp: what lies beside a row, at place `row` of scales and weights. `slot` of the lanes in `found`: where
/// the row belongs.
DEEP_EP_DEVICE void spread_beside(const SpreadRowsParams& params, std::int64_t row, std::int64_t slot,
                                  std::uint32_t found) {
  if (params.scales != nullptr) {
#pragma unroll 1
    for (int first = 0; first < params.num_scales; first += kWarpSize) {
      const int column = first + lane_index();
      const bool there = column < params.num_scales;
      const std::uint32_t scale = there ? load_weak(params.scales + row * params.scale_stride + column) : 0;
      for (std::uint32_t rest = found; rest != 0; rest &= rest - 1) {
        const std::int64_t to = warp::shuffle(slot, lowest_bit(rest));
        if (there) params.spread_scales[to * params.spread_stride + column * params.spread_column_stride] = scale;
      }
    }
  }
  if (params.weights != nullptr && params.expand && (found >> lane_index() & 1) != 0) {
    params.spread_weights[slot] = load_weak(params.weights + row * params.weight_stride + lane_index());
  }
  if (params.weights != nullptr && !params.expand) {
    const std::int64_t at = warp::shuffle(slot, 0) * params.metadata.num_topk + lane_index();
    if (lane_index() < params.metadata.num_topk) {
      const bool held = load_weak(params.local + at) >= 0;
      params.spread_weights[at] = held ? load_weak(params.weights + row * params.weight_stride + lane_index()) : 0;
    }
  }
}

/// By a whole warp: row `to` of the results becomes zero.
DEEP_EP_DEVICE void clear_row(const SpreadRowsParams& params, std::int64_t to) {
  auto* const row = reinterpret_cast<Vec16*>(params.spread_rows + to * params.row_bytes);
  const auto vectors = static_cast<int>(params.row_bytes / sizeof(Vec16));
#pragma unroll 1
  for (int at = lane_index(); at < vectors; at += kWarpSize) store_stream(row + at, Vec16{});
#pragma unroll 1
  for (int column = lane_index(); params.scales != nullptr && column < params.num_scales; column += kWarpSize) {
    params.spread_scales[to * params.spread_stride + column * params.spread_column_stride] = 0;
  }
  if (params.weights != nullptr && lane_index() == 0) params.spread_weights[to] = 0;
}

/// By all warps of the grid: gaps behind the experts' rows. Several warps share a gap.
DEEP_EP_DEVICE void clear_gaps(const SpreadRowsParams& params, std::int64_t warp, std::int64_t warps) {
  constexpr int kMostSharing = 64;
  const int sharing = params.alignment < kMostSharing ? params.alignment : kMostSharing;
#pragma unroll 1
  for (std::int64_t unit = warp; unit < std::int64_t{params.num_experts} * sharing; unit += warps) {
    const std::int64_t begin = load_weak(params.expert_ends + unit / sharing);
    const std::int64_t end = align_up(begin, params.alignment);
#pragma unroll 1
    for (std::int64_t to = begin + unit % sharing; to < end && to < params.num_spread; to += sharing) {
      clear_row(params, to);
    }
  }
}

/// By all threads of the grid: what each row selects on this rank. Rows behind the last one select nothing.
DEEP_EP_DEVICE void copy_selections(const SpreadRowsParams& params, std::int64_t valid) {
  const std::int64_t threads = std::int64_t{grid_blocks()} * block_threads();
  const std::int64_t thread = std::int64_t{block_index()} * block_threads() + thread_index();
  const int num_topk = params.metadata.num_topk;
  if (params.spread_topk_idx == nullptr && params.weights == nullptr) return;
#pragma unroll 1
  for (std::int64_t at = thread; at < params.metadata.num_rows * num_topk; at += threads) {
    const bool there = at < valid * num_topk;
    const std::int32_t local = there ? load_weak(params.local + at) : -1;
    if (params.spread_topk_idx != nullptr) {
      store_topk_index(params.spread_topk_idx, params.indices_are_64_bit, at, local);
    }
    if (params.weights != nullptr && !there) params.spread_weights[at] = 0;
  }
}

/// By warp `warp` of `warps`: its share of the words that keep their order.
DEEP_EP_DEVICE void copy_kept(const SpreadRowsParams& params, std::int64_t warp, std::int64_t warps) {
#pragma unroll 1
  for (const KeptWords& kept : params.kept) {
    const std::int64_t words = params.num_spread * (kept.row_bytes / 4), share = (words + warps - 1) / warps * 4;
    const std::int64_t begin = warp * share, rest = words * 4 - begin;
    if (kept.to == nullptr || rest <= 0) continue;
    copy_words(kept.to + begin, kept.from + begin, static_cast<std::uint32_t>(rest < share ? rest : share));
  }
}

/// One warp's rows: every `step`-th valid one.
struct RowSpreader {
  const SpreadRowsParams& params;
  RowPipe pipe;
  std::int64_t valid, step;
  std::int32_t skip_begin = 0, skip_end = 0;

  struct Unit {
    std::int64_t row;
    std::int64_t slot;    ///< where it belongs by the lane's selection, -1: nowhere
    std::int64_t beside;  ///< the place of what lies beside it
    const std::byte* from;
  };

  DEEP_EP_DEVICE std::int64_t slot_of(std::int64_t row) const {
    if (!params.expand) return lane_index() == 0 && (row < skip_begin || row >= skip_end) ? row : -1;
    if (lane_index() >= params.metadata.num_topk) return -1;
    const std::int64_t slot = load_weak(params.metadata.slots(row) + lane_index());
    return slot < params.num_spread ? slot : -1;
  }
  /// What is known of row `row`: where it belongs, where it lies, and what is beside it.
  DEEP_EP_DEVICE Unit look(std::int64_t row) const {
    const std::int32_t origin = params.heap == nullptr ? 0 : load_weak(params.metadata.row(row));
    Unit unit{row, slot_of(row), row, params.rows + row * params.row_bytes};
    if (params.heap == nullptr) return unit;
    const int source = origin < 0 ? params.num_ranks : origin / params.window.max_tokens;
    const std::int32_t token = origin - source * params.window.max_tokens;
    if (source >= params.num_ranks || !params.window.holds(token)) {
      unit.slot = -1;  // not in this pass
      return unit;
    }
    unit.beside = params.window.place_beside(source, params.window.slot_of(token));
    unit.from = source == params.rank
                    ? params.own_rows + std::int64_t{token} * params.row_bytes
                    : params.window.row(params.heap, landing_part(source, params.rank), params.window.slot_of(token));
    return unit;
  }
  /// The address of a row that belongs somewhere; else nullptr.
  DEEP_EP_DEVICE const std::byte* moved(const Unit& unit) const {
    return warp::any(unit.slot >= 0) ? unit.from : nullptr;
  }

  /// `unit`: what is known of the warp's first row, if there is one.
  DEEP_EP_DEVICE void spread(Unit unit) {
    const std::byte* row = unit.row < valid ? moved(unit) : nullptr;
    if (row != nullptr) pipe.begin(row, params.row_bytes);
    if (params.kept[0].to != nullptr) copy_kept(params, unit.row, step);
#pragma unroll 1
    while (unit.row < valid) {
      const std::int64_t following = unit.row + step;
      const Unit next = following < valid ? look(following) : Unit{valid, -1, 0, nullptr};
      const std::byte* next_row = moved(next);
      const auto beside = [&] {
        if (row != nullptr) spread_beside(params, unit.beside, unit.slot, warp::ballot(unit.slot >= 0));
        return true;
      };
      const auto to_slot = [&](auto store) {
        if (unit.slot >= 0) store(params.spread_rows + unit.slot * params.row_bytes);
      };
      pipe.move([=] { return row; }, [=] { return next_row; }, params.row_bytes, beside, to_slot);
      unit = next;
      row = next_row;
    }
    pipe.drop();
  }
};

DEEP_EP_DEVICE void spread_rows_body(const SpreadRowsParams& params, std::byte* memory) {
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  // Neighbours in order are in different blocks, so that a few rows keep all multiprocessors busy, too.
  const std::int64_t warp = std::int64_t{warp_index()} * grid_blocks() + block_index();
  const WarpStages shared(Carver(memory), block_warps(), params.pipe);
  RowSpreader spreader{params, shared.pipe(warp_index()), 0, warps};
  // A few rows take as long as the memory does, so that all loads that need no other's result are under way at once.
  const std::int32_t num_valid = load_weak(params.metadata.num_valid);
  const std::uint64_t failed = load_relaxed<Scope::gpu>(params.abort);
  if (params.skipped[0] != nullptr) spreader.skip_begin = load_weak(params.skipped[0]);
  if (params.skipped[1] != nullptr) spreader.skip_end = load_weak(params.skipped[1]);
  RowSpreader::Unit ahead{warp, -1, 0, nullptr};
  if (warp < params.metadata.num_rows) ahead = spreader.look(warp);
  // The metadata of a call that has failed is not there.
  if (failed != 0) return;
  const std::int64_t valid = num_valid < params.metadata.num_rows ? num_valid : params.metadata.num_rows;
  spreader.valid = valid;

  // 1. Rows, and what is beside them.
  if (lane_index() == 0) spreader.pipe.init();
  spreader.spread(ahead);

  // 2. The places that no row has.
  if (params.expert_ends != nullptr) clear_gaps(params, warp, warps);
  if (!params.expand) copy_selections(params, valid);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(spread_rows, deep_ep::device::spread_rows_body)
