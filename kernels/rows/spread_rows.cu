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

/// A row, as the lanes of a warp know it.
struct SpreadRow {
  std::int64_t number;
  std::int64_t slot;      ///< where it belongs by the lane's selection, -1: nowhere
  std::int64_t beside;    ///< the place of what lies beside it
  const std::byte* from;  ///< nullptr: it belongs nowhere
};

/// By a whole warp, not expanded: what row `number` selects on this rank, nothing unless the row is `there`.
DEEP_EP_DEVICE void store_selections(const SpreadRowsParams& params, std::int64_t number, bool there,
                                     std::int64_t beside) {
  if (params.local == nullptr || lane_index() >= params.metadata.num_topk) return;
  const std::int64_t at = number * params.metadata.num_topk + lane_index();
  const std::int32_t local = there ? load_weak(params.local + at) : -1;
  if (params.spread_topk_idx != nullptr) {
    store_topk_index(params.spread_topk_idx, params.indices_are_64_bit, at, local);
  }
  if (params.weights == nullptr) return;
  params.spread_weights[at] = local >= 0 ? load_weak(params.weights + beside * params.weight_stride + lane_index()) : 0;
}

/// By a whole warp: what lies beside a row. The lanes in `found` have a slot.
DEEP_EP_DEVICE void spread_beside(const SpreadRowsParams& params, const SpreadRow& row, std::uint32_t found) {
  WarpPiece<std::uint32_t, 2> held;
#pragma unroll 1
  for (int first = 0; params.scales != nullptr && first < params.num_scales; first += held.kElements) {
    held.each(first, params.num_scales, [&](std::uint32_t& scale, int at) {
      scale = load_weak(params.scales + row.beside * params.scale_stride + at);
    });
    each_bit(found, [&](int lane) {
      std::uint32_t* const to = params.spread_scales + warp::shuffle(row.slot, lane) * params.spread_stride;
      held.each(first, params.num_scales,
                [&](std::uint32_t scale, int at) { to[at * params.spread_column_stride] = scale; });
    });
  }
  if (!params.expand) {
    store_selections(params, row.number, true, row.beside);
  } else if (params.weights != nullptr && row.slot >= 0) {
    params.spread_weights[row.slot] = load_weak(params.weights + row.beside * params.weight_stride + lane_index());
  }
}

/// By all warps of the grid: gaps behind the experts' rows become zero.
DEEP_EP_DEVICE void clear_gaps(const SpreadRowsParams& params, std::int64_t warp, std::int64_t warps) {
  const auto vectors = static_cast<int>(params.row_bytes / sizeof(Vec16));
#pragma unroll 1
  for (auto unit = static_cast<int>(warp); unit < params.num_experts * params.sharing;
       unit += static_cast<int>(warps)) {
    const std::int32_t begin = load_weak(params.expert_ends + unit / params.sharing);
    const std::int32_t end = align_up(begin, params.alignment);
#pragma unroll 1
    for (std::int32_t to = begin + unit % params.sharing; to < end && to < params.num_spread; to += params.sharing) {
      auto* const row = reinterpret_cast<Vec16*>(params.spread_rows + std::int64_t{to} * params.row_bytes);
      warp::each(vectors, [=](int at) { store_stream(row + at, Vec16{}); });
      warp::each(params.scales != nullptr ? params.num_scales : 0, [&](int column) {
        params.spread_scales[to * params.spread_stride + column * params.spread_column_stride] = 0;
      });
      if (params.weights != nullptr && lane_index() == 0) params.spread_weights[to] = 0;
    }
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

/// Finds rows, by a whole warp.
struct RowFinder {
  const SpreadRowsParams& params;
  std::int32_t skip_begin = 0, skip_end = 0;  ///< rows that stay where they are

  DEEP_EP_DEVICE std::int64_t slot_of(std::int64_t row) const {
    if (!params.expand) return lane_index() == 0 && (row < skip_begin || row >= skip_end) ? row : -1;
    if (lane_index() >= params.metadata.num_topk) return -1;
    const std::int64_t slot = load_weak(params.metadata.slots(row) + lane_index());
    return slot < params.num_spread ? slot : -1;
  }
  /// What is known of row `row`: where it belongs, where it lies, and what is beside it.
  DEEP_EP_DEVICE SpreadRow look(std::int64_t row) const {
    const std::int32_t origin = params.heap == nullptr ? 0 : load_weak(params.metadata.row(row));
    SpreadRow found{row, slot_of(row), row, params.rows + row * params.row_bytes};
    if (params.heap != nullptr) {
      const int source = origin < 0 ? params.num_ranks : origin / params.window.max_tokens;
      const std::int32_t token = origin - source * params.window.max_tokens;
      const std::int32_t place = params.window.slot_of(token);
      if (source >= params.num_ranks || !params.window.holds(token)) found.slot = -1;  // not in this pass
      found.beside = params.window.place_beside(source, place);
      found.from = source == params.rank ? params.own_x + std::int64_t{token} * params.row_bytes
                                         : params.window.row(params.heap, landing_part(source, params.rank), place);
    }
    if (!warp::any(found.slot >= 0)) found.from = nullptr;
    return found;
  }
};

DEEP_EP_DEVICE void spread_rows_body(const SpreadRowsParams& params, std::byte* memory) {
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  // Neighbours in order are in different blocks, so that a few rows keep all multiprocessors busy, too.
  const std::int64_t warp = std::int64_t{warp_index()} * grid_blocks() + block_index();
  RowPipe pipe = WarpStages{Carver(memory), block_warps(), params.pipe}.pipe(warp_index());
  // A few rows take as long as the memory does, so that all loads that need no other's result are under way at once.
  const std::int32_t num_valid = load_weak(params.metadata.num_valid);
  const std::uint64_t failed = load_relaxed<Scope::gpu>(params.abort);
  RowFinder finder{params};
  if (params.skipped[0] != nullptr) finder.skip_begin = load_weak(params.skipped[0]);
  if (params.skipped[1] != nullptr) finder.skip_end = load_weak(params.skipped[1]);
  SpreadRow row{warp, -1, 0, nullptr};
  if (warp < params.metadata.num_rows) row = finder.look(warp);
  // The metadata of a call that has failed is not there.
  if (failed != 0) return;
  const std::int64_t valid = num_valid < params.metadata.num_rows ? num_valid : params.metadata.num_rows;

  // 1. Rows, and what is beside them.
  if (lane_index() == 0) pipe.init();
  if (warp < valid && row.from != nullptr) pipe.begin(row.from, params.row_bytes);
  if (params.kept[0].to != nullptr) copy_kept(params, warp, warps);
#pragma unroll 1
  while (row.number < valid) {
    const std::int64_t following = row.number + warps;
    const SpreadRow next = following < valid ? finder.look(following) : SpreadRow{valid, -1, 0, nullptr};
    const auto to_slot = [&](auto store) {
      if (row.slot >= 0) store(params.spread_rows + row.slot * params.row_bytes);
    };
    pipe.move([=] { return row.from; }, [=] { return next.from; }, params.row_bytes, to_slot);
    if (row.from != nullptr) spread_beside(params, row, warp::ballot(row.slot >= 0));
    row = next;
  }
  pipe.drop();

  // 2. The places that no row has. Rows behind the last one select nothing.
  if (params.expert_ends != nullptr) clear_gaps(params, warp, warps);
#pragma unroll 1
  for (std::int64_t behind = valid + warp; !params.expand && behind < params.metadata.num_rows; behind += warps) {
    store_selections(params, behind, false, 0);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(spread_rows, deep_ep::device::spread_rows_body)
