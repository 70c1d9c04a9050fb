// Combine's way around an owner that is late. A send part must wait for nobody: a hook is for letting other work run
// meanwhile. So where a near owner has not said yet what its tokens select, an expert rank sends what its experts made
// as it is, one row for each selection of the dispatch, and the owner adds them up when it comes, the way the expert
// rank would have: weighted in fp32, selections ascending, rounded. The result has the same bits.
//
//   the row's own place   the first of its selections, with marked tags: whoever polls a line sees from its tag what it
//   is a line behind it      the note: which expert each selection of the dispatch named unreduced rows        the
//   other selections, by the owner's token and selection, in a part of the window for all ranks
//
// Nobody waits for an unreduced row that the owner no longer selects, so it may come late. Their places are written to
// only when all ranks have received the call before the last (CombineReach::has_room_unreduced). A rank that is masked
// and still writes there can spoil another's row: it looks lost then.
//
// Warps that share a row decide for their own lines, so a row may be both. Rows in LogFMT and those for far owners
// always wait for the selections.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/line.hpp"

namespace deep_ep::device::low_latency {

/// The tag of an unreduced row's own place.
DEEP_EP_DEVICE std::uint64_t marked_tag(std::uint64_t epoch) { return epoch | kLineMark; }

/// The tag of the others. Their places are everybody's, so ranks that mean different calls must not take a row of each
/// other for their own.
DEEP_EP_DEVICE std::uint64_t unreduced_tag(std::uint64_t epoch, std::uint32_t call) {
  return (epoch ^ std::uint64_t{call} << 40) | kLineMark;
}

/// What an expert rank says about an unreduced row: in each lane, of a selection of the dispatch.
struct UnreducedNote {
  static constexpr std::uint32_t kNothing = 0xffff;  ///< it named no expert of this rank
  static constexpr std::uint32_t kNoRoom = 0xfffe;   ///< it did, but the expert had more rows than fit
  static constexpr int kMostExperts = 0xfffe;        ///< of a rank that can be told apart

  std::uint32_t expert;  ///< local, or one of the above
  std::uint32_t call;    ///< call_of(), in every lane

  DEEP_EP_DEVICE bool has_row() const { return expert < kNoRoom; }

  /// `position`: of the lane's selection in x, or negative, see LowLatencyRowTable.
  DEEP_EP_DEVICE static UnreducedNote of(std::int32_t position, int rows_of_expert, std::uint32_t call) {
    if (position >= 0) return {static_cast<std::uint32_t>(position / rows_of_expert), call};
    return {position == LowLatencyRowTable::kNoRoom ? kNoRoom : kNothing, call};
  }
  /// By a whole warp, to the line that the lanes' `to` lie in. `stage`: a line of shared memory, free afterwards.
  DEEP_EP_DEVICE void store(std::byte* to, std::byte* stage, std::uint64_t epoch) const {
    reinterpret_cast<std::uint16_t*>(stage)[lane_index()] = static_cast<std::uint16_t>(expert);
    if (lane_index() == 0) reinterpret_cast<std::uint32_t*>(stage)[kCallWord] = call;
    warp::sync();
    store_line(to, tagged_part(stage, 0, epoch), LineLane().line == 0);
    warp::sync();
  }
  /// By a whole warp: what a line says that has come.
  DEEP_EP_DEVICE static UnreducedNote read(const LinePart& line) {
    const int lane = lane_index();
    const std::uint64_t low = warp::shuffle(line.word[0], lane / 8);
    const std::uint64_t high = warp::shuffle(line.word[1], lane / 8);
    const std::uint64_t word = lane % 8 < 4 ? low : high;
    const std::uint64_t call = warp::shuffle(line.word[0], kCallWord / 4);
    return {static_cast<std::uint32_t>(word >> (lane % 4 * 16)) & 0xffffu, static_cast<std::uint32_t>(call)};
  }

 private:
  static constexpr int kCallWord = kMaxTopk / 2;  ///< behind the experts
  static_assert(kMaxTopk == kWarpSize && kCallWord % 4 == 0 && 4 * kCallWord + 4 <= kTaggedPayload);
};

/// By a whole warp, as owner: what a rank's part of a token is the sum of.
struct UnreducedTerms {
  std::uint32_t left = 0;  ///< bit for bit, selections whose rows are still to be added
  int from;                ///< in each lane the selection of the dispatch whose row the lane's selection means
  float weight;
  int first;  ///< the selection of the dispatch whose row is in the row's own place
  std::uint32_t call;
  int unknown = -1;  ///< an expert that is selected, but that the dispatch did not name

  DEEP_EP_DEVICE int next() const { return warp::shuffle(from, lowest_bit(left)); }
  DEEP_EP_DEVICE float take() {
    const float its_weight = warp::shuffle(weight, lowest_bit(left));
    left &= left - 1;
    return its_weight;
  }

  /// In the same way as RowChooser. False, in all lanes: the ranks mean different calls, or a selection is of an expert
  /// that the dispatch did not name.
  DEEP_EP_DEVICE bool find(const LowLatencyCombineParams& params, const UnreducedNote& note, int token, int rank) {
    call = call_of(params);
    if (!warp::all(call == note.call)) {
      call = note.call;
      return false;
    }
    const std::uint32_t rows = warp::ballot(note.has_row());
    first = lowest_bit(rows);
    from = -1;
    weight = 1.0f;
    if (params.rank_major) {
      if (lane_index() == 0) from = first;
      left = rows != 0 ? 1 : 0;
      return true;
    }
    const Selections selections{params};
    const int lane = lane_index();
    const LoadedSelection now = lane < params.num_topk ? selections.load(token, lane) : LoadedSelection{-1, 0.0f};
    const int expert = selections.expert_of(now.index);
    const int local = expert - rank * params.num_local_experts;
    const bool here = expert >= 0 && local >= 0 && local < params.num_local_experts;
    weight = now.weight;
    if (here && note.expert == static_cast<std::uint32_t>(local)) from = lane;
#pragma unroll 1
    for (int k = 0; k < params.num_topk; ++k) {
      if (warp::shuffle(note.expert, k) == static_cast<std::uint32_t>(local) && here && from < 0) from = k;
    }
    left = warp::ballot(from >= 0);
    const bool all_had_room = !warp::any(note.expert == UnreducedNote::kNoRoom);
    const std::uint32_t lacking = warp::ballot(here && from < 0 && all_had_room);
    if (lacking == 0) return true;
    unknown = warp::shuffle(expert, lowest_bit(lacking));
    return false;
  }
  /// When there is nothing to be found.
  template <class Reach>
  DEEP_EP_DEVICE void refuse(const Reach& reach, const LowLatencyCombineParams& params, int rank, int token) const {
    const bool other_call = unknown < 0;
    refuse_call(reach, rank, other_call ? 0 : 1, other_call ? call_of(params) : static_cast<std::uint32_t>(unknown),
                other_call ? call : static_cast<std::uint32_t>(token));
  }
};

}  // namespace deep_ep::device::low_latency
