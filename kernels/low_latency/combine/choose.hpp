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
    const bool wanted = warp::any(here);  // rank-major, all of the sum or nothing
    choice = {wanted ? 1u : 0u, 1.0f, wanted};
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

  /// `expert`: in each lane the local expert of a selection, or -1. It is that of the dispatch, whose row may have had
  /// no room, and which then is left out; or the call is over.
  DEEP_EP_DEVICE bool choose_experts(const CombineRow& row, int expert, float weight, CombineChoice& choice) const {
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    const std::int32_t in_expert = row.position - expert * expert_rows;  // if it is the row of that expert
    const bool selected = expert >= 0 && row.position != LowLatencyRowTable::kNoRoom;
    const bool other = selected && (row.position < 0 || in_expert < 0 || in_expert >= expert_rows);
    if (other) {
      const int global = params.common.rank * params.num_local_experts + expert;
      refuse_call(reach, row.source, 1, static_cast<std::uint64_t>(global), static_cast<std::uint64_t>(row.token));
    }
    if (warp::any(other)) return false;
    choice = {warp::ballot(selected), weight, warp::any(expert >= 0)};
    return true;
  }
};

}  // namespace deep_ep::device::low_latency
