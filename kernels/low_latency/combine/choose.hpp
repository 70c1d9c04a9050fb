// What a row of combine is made of: the rows that the dispatch brought, as far as the owner still selects them.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/combine/rows.hpp"
#include "kernels/low_latency/combine/sum.hpp"

namespace deep_ep::device::low_latency {

/// By a whole warp.
template <class Reach>
struct RowChooser {
  const LowLatencyCombineParams& params;
  const Reach& reach;
  const std::uint32_t& call;  ///< see call_of()

  /// Finds the rows that the owner's selections mean. False: it has not said yet, or the call is over.
  DEEP_EP_DEVICE bool choose(const CombineRow& row, CombineChoice& choice) const {
    Selection now{-1, 0.0f};
    if (!warp::all(lane_index() >= params.num_topk || load_selection(row, now))) return false;
    const int first_expert = params.common.rank * params.num_local_experts;
    const int expert = now.expert - first_expert;  // local
    const bool here = now.expert >= first_expert && expert < params.num_local_experts;
    if (!params.rank_major) return choose_experts(row, here ? expert : -1, now.weight, choice);
    choice = choose_sum(row, warp::any(here));
    return true;
  }

 private:
  /// The lane's selection, if it is there.
  DEEP_EP_DEVICE bool load_selection(const CombineRow& row, Selection& now) const {
    if (!reach.is_far(row.source)) {
      const Cell cell = load_cell(reach.selections_from(row.source, row.token) + lane_index());
      now = Selection::unpack(cell.payload);
      if (Selection::epoch_in(cell) < reach.epoch) return false;
      const std::uint32_t theirs = Selection::call_in(cell);
      if (theirs == call) return true;
      refuse_call(reach, row.source, 0, call, theirs);
      return false;
    }
    if (!reach.has_announced(row.source)) return false;
    const FarSelections announced{params, reach.far_selections(row.source)};
    if (row.index == 0 && lane_index() == 0) announced.check_call(reach, row.source);
    if (!reach.has_room_on_way_to(row.source)) return false;
    now = announced.selection(row.token, lane_index());
    return true;
  }

  /// The row is the sum already: all of it, or nothing.
  DEEP_EP_DEVICE CombineChoice choose_sum(const CombineRow& row, bool wanted) const {
    return {wanted ? row.position : -1, 1.0f, wanted, false};
  }

  /// `expert`: in each lane the local expert of a selection, or -1. Each means the row that the dispatch brought for
  /// the same selection if that named the same expert, else the first that the dispatch brought for this expert. If
  /// there is none, the call is over; but rows for which the dispatch had no room are left out.
  DEEP_EP_DEVICE bool choose_experts(const CombineRow& row, int expert, float weight, CombineChoice& choice) const {
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
      const bool all_had_room = !warp::any(row.position == LowLatencyRowTable::kNoRoom);
      const bool unknown = expert >= 0 && position < 0 && all_had_room;
      if (unknown) {
        const int global = params.common.rank * params.num_local_experts + expert;
        refuse_call(reach, row.source, 1, static_cast<std::uint64_t>(global), static_cast<std::uint64_t>(row.token));
      }
      if (warp::any(unknown)) return false;
    }
    choice = {position, weight, same, !same && warp::any(expert >= 0)};
    return true;
  }
};

}  // namespace deep_ep::device::low_latency
