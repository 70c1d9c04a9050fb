// Received rows into a layout. A warp reads a piece of a row once and writes it wherever the row belongs; rows that no
// selection names are neither read nor written.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// A piece of a row: a whole warp's registers.
struct RowPiece {
  static constexpr int kVectors = 4;  ///< 16-byte vectors that a lane holds at once

  Vec16 held[kVectors] = {};

  static constexpr std::uint32_t kBytes = kVectors * kWarpSize * sizeof(Vec16);

  DEEP_EP_DEVICE void load(const std::byte* from, int vectors) {
    for (int v = 0; v < kVectors; ++v) {
      const int at = lane_index() + v * kWarpSize;
      if (at < vectors) held[v] = load_weak(reinterpret_cast<const Vec16*>(from) + at);
    }
  }
  DEEP_EP_DEVICE void store(std::byte* to, int vectors) const {
    for (int v = 0; v < kVectors; ++v) {
      const int at = lane_index() + v * kWarpSize;
      if (at < vectors) store_stream(reinterpret_cast<Vec16*>(to) + at, held[v]);
    }
  }
};

DEEP_EP_DEVICE int vectors_from(std::uint32_t offset, std::uint32_t row_bytes) {
  const std::uint32_t rest = row_bytes - offset;
  return static_cast<int>((rest < RowPiece::kBytes ? rest : RowPiece::kBytes) / sizeof(Vec16));
}

/// By a whole warp: what lies beside a row. `slot` of the lanes in `found`: where the row belongs.
DEEP_EP_DEVICE void spread_beside(const SpreadRowsParams& params, std::int64_t row, std::int64_t slot,
                                  std::uint32_t found) {
  if (params.scales != nullptr) {
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
}

/// By a whole warp: row `to` of the results becomes zero.
DEEP_EP_DEVICE void clear_row(const SpreadRowsParams& params, std::int64_t to) {
  const RowPiece zeros{};
  for (std::uint32_t offset = 0; params.rows != nullptr && offset < params.row_bytes; offset += RowPiece::kBytes) {
    zeros.store(params.spread_rows + to * params.row_bytes + offset, vectors_from(offset, params.row_bytes));
  }
  for (int column = lane_index(); params.scales != nullptr && column < params.num_scales; column += kWarpSize) {
    params.spread_scales[to * params.spread_stride + column * params.spread_column_stride] = 0;
  }
  if (params.weights != nullptr && lane_index() == 0) params.spread_weights[to] = 0;
}

/// By all warps of the grid: gaps behind the experts' rows. Several warps share a gap.
DEEP_EP_DEVICE void clear_gaps(const SpreadRowsParams& params, std::int64_t warp, std::int64_t warps) {
  constexpr int kMostSharing = 64;
  const int sharing = params.alignment < kMostSharing ? params.alignment : kMostSharing;
  for (std::int64_t unit = warp; unit < std::int64_t{params.num_experts} * sharing; unit += warps) {
    const int expert = static_cast<int>(unit / sharing);
    std::int64_t end = 0;  // of the expert's rows with their gap
    for (int other = lane_index(); other <= expert; other += kWarpSize) {
      const std::int64_t count = load_weak(params.expert_counts + other);
      end += (count + params.alignment - 1) / params.alignment * params.alignment;
    }
    end = warp::sum(end);
    const std::int64_t count = load_weak(params.expert_counts + expert);
    const std::int64_t gap = (params.alignment - count % params.alignment) % params.alignment;
    for (std::int64_t to = end - gap + unit % sharing; to < end && to < params.num_spread; to += sharing) {
      clear_row(params, to);
    }
  }
}

/// By all threads of the grid: what each row selects on this rank, and with which weights.
DEEP_EP_DEVICE void copy_selections(const SpreadRowsParams& params, std::int64_t valid) {
  const std::int64_t threads = std::int64_t{grid_blocks()} * block_threads();
  const std::int64_t thread = std::int64_t{block_index()} * block_threads() + thread_index();
  const int num_topk = params.metadata.num_topk;
  if (params.spread_topk_idx == nullptr && params.weights == nullptr) return;
  for (std::int64_t at = thread; at < params.metadata.num_rows * num_topk; at += threads) {
    const std::int32_t local = load_weak(params.local + at);
    if (params.spread_topk_idx != nullptr) {
      store_topk_index(params.spread_topk_idx, params.indices_are_64_bit, at, local);
    }
    if (params.weights == nullptr) continue;
    const std::int64_t row = at / num_topk;
    const bool held = row < valid && local >= 0;
    params.spread_weights[at] =
        held ? load_weak(params.weights + row * params.weight_stride + (at - row * num_topk)) : 0;
  }
}

DEEP_EP_DEVICE void spread_rows_body(const SpreadRowsParams& params, std::byte* /*shared*/) {
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  const std::int64_t warp = std::int64_t{block_index()} * block_warps() + warp_index();
  const std::int64_t valid = params.metadata.valid();

  // 1. Rows, and what is beside them.
  const bool rows_wanted = params.rows != nullptr;
  const std::int64_t pieces = rows_wanted ? (params.row_bytes + RowPiece::kBytes - 1) / RowPiece::kBytes : 1;
  const bool anything = rows_wanted || params.scales != nullptr || (params.weights != nullptr && params.expand);
  for (std::int64_t unit = warp; anything && unit < valid * pieces; unit += warps) {
    const std::int64_t row = unit / pieces;
    std::int64_t slot = -1;
    if (!params.expand) {
      slot = lane_index() == 0 ? row : -1;
    } else if (lane_index() < params.metadata.num_topk) {
      slot = load_weak(params.metadata.slots(row) + lane_index());
    }
    const std::uint32_t found = warp::ballot(slot >= 0 && slot < params.num_spread);
    if (found == 0) continue;
    if (rows_wanted) {
      const auto offset = static_cast<std::uint32_t>(unit % pieces) * RowPiece::kBytes;
      const int vectors = vectors_from(offset, params.row_bytes);
      RowPiece piece;
      piece.load(params.rows + row * params.row_bytes + offset, vectors);
      for (std::uint32_t rest = found; rest != 0; rest &= rest - 1) {
        const std::int64_t to = warp::shuffle(slot, lowest_bit(rest));
        piece.store(params.spread_rows + to * params.row_bytes + offset, vectors);
      }
    }
    if (unit % pieces == 0) spread_beside(params, row, slot, found);
  }

  // 2. What nothing names.
  if (params.expert_counts != nullptr) clear_gaps(params, warp, warps);
  if (!params.expand) copy_selections(params, valid);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(spread_rows, deep_ep::device::spread_rows_body)
