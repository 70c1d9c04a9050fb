// What a row of combine is made of: the rows that the dispatch brought, as far as the owner still selects them.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/transport/rails.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

/// A received row, as a warp remembers it.
struct CombineRow {
  int source, index;
  std::int32_t rows;      ///< of the source; this one is there if `index` is below
  std::int32_t token;     ///< at the source
  std::int32_t position;  ///< in each lane that of a selection, negative: not on this rank
};

/// What is added up for the owner, in the order of the lanes.
struct CombineChoice {
  std::int32_t position;  ///< in each lane a row of x, negative for none
  float weight;
  bool as_dispatched;  ///< exactly the rows that the dispatch brought
};

/// By rails: where in the relay's heap, which is `heap`, the row of `member` of its node lies, for the owner's token. A
/// relay does not put its own into the window: that place is for the rows that the owner has for it.
DEEP_EP_DEVICE std::byte* combine_row_at_relay(const LowLatencyCombineParams& params, std::uint64_t epoch, int owner,
                                               int member, int token, std::byte* heap) {
  constexpr LowLatencyKind kCombine = LowLatencyKind::combine;
  const LowLatencyParams& common = params.common;
  const Rails rails(common);
  if (rails.relay_of(owner) == member) {
    return heap + common.rdma.staging.relayed_row_at(kCombine, epoch, rails.node_of(owner), token, params.row_bytes);
  }
  const int place = rails.place_at_relay(owner, member);
  return heap + common.window.row_at(kCombine, epoch, place, token, params.row_bytes);
}

/// By a whole warp.
template <bool kRdma>
struct RowChooser {
  const LowLatencyCombineParams& params;
  std::uint64_t epoch;

  /// Finds the rows that the owner's selections mean. False: it has not said yet.
  DEEP_EP_DEVICE bool choose(const CombineRow& row, CombineChoice& choice) const {
    const LowLatencyParams& common = params.common;
    const int lane = lane_index();
    Selection now{-1, 0.0f};
    bool there = true;
    if (lane < params.num_topk) {
      const auto* cells =
          reinterpret_cast<const Cell*>(common.local + common.window.selections_at(epoch, row.source, row.token));
      const Cell cell = is_far<kRdma>(common, row.source) ? load_far_selection(row) : load_cell(cells + lane);
      there = cell.epoch >= epoch;
      now = Selection::unpack(cell.payload);
    }
    if (!warp::all(there)) return false;
    const int first_expert = common.rank * params.num_local_experts;
    const int expert = now.expert - first_expert;  // local
    const bool here = now.expert >= first_expert && expert < params.num_local_experts;
    choice = params.rank_major ? choose_sum(row, warp::any(here)) : choose_experts(row, here ? expert : -1, now.weight);
    return true;
  }

 private:
  /// Selections that come by RDMA are no cells: they lie close together, and one word of their owner says that all are
  /// there.
  DEEP_EP_DEVICE Cell load_far_selection(const CombineRow& row) const {
    const LowLatencyParams& common = params.common;
    Cell cell{0, load_acquire<Scope::system>(progress_word(common, LowLatencyKind::combine, epoch, row.source)) >> 16};
    if (cell.epoch < epoch) return cell;
    const FarSelections all = far_selections(common, epoch, row.source);
    if (row.index == 0 && lane_index() == 0) check_far_shape(params, all, row.source);
    // By rails the row goes to another rank, whose word has to have come, too: nearly always long ago.
    const Rails rails(common);
    if (rails.used() && epoch > 2 && rails.relay_of(row.source) != common.rank) {
      const auto* word = acknowledged_word(common, LowLatencyKind::combine, rails.relay_of(row.source));
      if (load_acquire<Scope::system>(word) < epoch - 2) return {0, 0};
    }
    cell.payload = load_weak(all.selection(row.token, params.num_topk, lane_index()));
    return cell;
  }

  /// The row is the sum already: all of it, or nothing.
  DEEP_EP_DEVICE CombineChoice choose_sum(const CombineRow& row, bool wanted) const {
    return {wanted ? row.position : -1, 1.0f, wanted};
  }

  /// `expert`: in each lane the local expert of a selection, or -1. Each means the row that the dispatch brought for
  /// the same selection if that named the same expert, else the first that the dispatch brought for this expert.
  DEEP_EP_DEVICE CombineChoice choose_experts(const CombineRow& row, int expert, float weight) const {
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    const std::int32_t in_expert = row.position - expert * expert_rows;  // if it is the row of that expert
    const bool as_dispatched = expert < 0 ? row.position < 0 : in_expert >= 0 && in_expert < expert_rows;
    const bool same = warp::all(as_dispatched);
    std::int32_t position = as_dispatched ? row.position : -1;
    if (!same) {
      const int dispatched = row.position >= 0 ? row.position / expert_rows : -1;
#pragma unroll 1  // rare: registers matter more
      for (int k = 0; k < params.num_topk; ++k) {
        const int candidate = warp::shuffle(dispatched, k);
        const std::int32_t its_row = warp::shuffle(row.position, k);
        if (position < 0 && expert >= 0 && candidate == expert) position = its_row;
      }
    }
    return {position, weight, same};
  }
};

}  // namespace deep_ep::device::low_latency
