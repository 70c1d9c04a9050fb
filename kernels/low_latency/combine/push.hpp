// The expert side of combine: for each row that the dispatch brought, this rank weights, sums and rounds what its
// experts made of the token, and sends it to the token's owner as one row.
//
// Groups of warps take rows in turn (ReceivedRows), and every owner's rows go in token order, so that it can begin to
// add. The warps of a group share a row by its lines and need nothing from each other: each looks for the owner's
// selections, sums its channels and stores its lines. Rows whose owner has not announced its selections for a while are
// deferred until all others are done: a rank that is late must not delay what others get, nor make them look late.
#pragma once

#include "kernels/low_latency/combine/shared.hpp"

namespace deep_ep::device::low_latency {

/// The owner's choice: which of the rows that the dispatch brought it still selects.
struct CombineChoice {
  std::uint32_t rows;  ///< bit k: that of selection k
  float weight;        ///< in lane k
  bool owed;           ///< the owner waits for a row, even if it is the sum of none
};

template <class Reach>
struct CombinePusher {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  int group, groups;          ///< in the block
  int warp;                   ///< in the group
  const std::uint32_t& call;  ///< see call_of()
  std::uint32_t* deferred;    ///< for each row that falls to this warp: is it deferred?
  std::byte* stage;
  CombineRow next{};      ///< the next row to push
  std::int32_t most = 0;  ///< rows of any source that this lane has seen

  /// How long rows wait in turn for their owners, all together, in nanoseconds: an owner that is only a little late
  /// costs no second look at the row, and a late one delays the rows of other owners for no longer than this.
  static constexpr std::uint64_t kPatience = 50'000;
  static constexpr int kTogether = 8;  ///< loads of a thread that are under way at once

  /// Starts the loads that do not depend on the call.
  DEEP_EP_DEVICE void load_first() {
    next = received().load_row(received().first_item());
    most = received().most_rows();
  }

  /// All rows in turn; then again and again the deferred ones.
  DEEP_EP_DEVICE void push_all(const Reach& reach) {
    const int end = warp::max(most) * params.common.num_ranks;
    const std::uint64_t start = now_ns();
    int waiting = 0;
    std::int64_t waits_since = 0;
#pragma unroll 1
    for (int pass = 0;; ++pass) {
      bool counted = pass == 0;  // the time since the last pass, as a wait for the owner of the first row
#pragma unroll 1
      for (int index = 0, item = received().first_item(); item < end; ++index, item += received().step()) {
        const bool deferred_before = pass > 0 && (deferred[index / 32] & bit(index)) != 0;
        if (pass > 0 && !deferred_before) continue;
        if (pass == 0 && index % 32 == 0) set_bits(index, 0);
        CombineRow row = next;
        next = received().load_row(pass == 0 ? item + received().step() : item);
        if (pass > 0) row = next;
        if (row.index >= row.rows) continue;
        if (!counted) waits_since = count_wait(row.source, waits_since);
        counted = true;
        const bool lost = pass == 0 ? left_out(row.source) : gives_up(reach, row.source, start);
        const bool late = !lost && !push(reach, row, pass == 0 ? kPatience : 0, start);
        if (late == deferred_before) continue;
        set_bits(index, deferred[index / 32] ^ bit(index));
        waiting += late ? 1 : -1;
      }
      if (waiting == 0 || warp::any(aborted(params.common.wait))) return;
      if (pass == 0) waits_since = clock_cycles();
      pause(pass + 1);
    }
  }

 private:
  DEEP_EP_DEVICE ReceivedRows received() const { return {params, group, groups}; }
  DEEP_EP_DEVICE static std::uint32_t bit(int index) { return 1u << (index % 32); }
  DEEP_EP_DEVICE void set_bits(int index, std::uint32_t bits) const {
    warp::sync();
    if (lane_index() == 0) deferred[index / 32] = bits;
    warp::sync();
  }

  /// The same for all lanes, even while another warp masks the rank.
  DEEP_EP_DEVICE bool left_out(int source) const { return warp::any(masked(params.common, source)); }

  /// Makes the choice if the owner announces its selections soon: one that is only a little late is waited for, so that
  /// what was loaded in advance is not wasted. False after a fault, too.
  DEEP_EP_DEVICE bool await_choice(const Reach& reach, const CombineRow& row, std::uint64_t patience_ns,
                                   std::uint64_t start, CombineChoice& choice) const {
    std::int64_t begin = 0;
    bool chosen = false;
    const auto arrived = [&](const Poll&) {
      chosen = choose(reach, row, choice);
      if (chosen || patience_ns == 0) return true;
      if (begin == 0) begin = clock_cycles();
      return false;
    };
    poll_until<16>(arrived, [&](const Poll&) {
      return !warp::any(now_ns() - start < patience_ns) || warp::any(aborted(params.common.wait));
    });
    if (begin != 0) count_wait(row.source, begin);
    return chosen;
  }

  /// Finds the rows that the owner's selections mean. False: it has not said yet, or the call is over.
  DEEP_EP_DEVICE bool choose(const Reach& reach, const CombineRow& row, CombineChoice& choice) const {
    Selection now{-1, 0.0f};
    if (!warp::all(lane_index() >= params.num_topk || load_selection(reach, row, now))) return false;
    const int first_expert = params.common.rank * params.num_local_experts;
    const int expert = now.expert - first_expert;  // local
    const bool here = now.expert >= first_expert && expert < params.num_local_experts;
    // It is the expert of the dispatch, whose row may have had no room, and which then is left out; or the call is
    // over.
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    const std::int32_t in_expert = row.position - expert * expert_rows;  // if it is the row of that expert
    const bool selected = here && row.position != LowLatencyRowTable::kNoRoom;
    const bool other = selected && (row.position < 0 || in_expert < 0 || in_expert >= expert_rows);
    if (other) {
      refuse_call(params.common, reach.epoch, row.source, 1, static_cast<std::uint64_t>(now.expert),
                  static_cast<std::uint64_t>(row.token));
    }
    if (warp::any(other)) return false;
    choice = {warp::ballot(selected), now.weight, warp::any(here)};
    return true;
  }

  /// The lane's selection, if it is there.
  DEEP_EP_DEVICE bool load_selection(const Reach& reach, const CombineRow& row, Selection& now) const {
    if (!reach.is_far(row.source)) {
      const Cell cell = load_cell(reach.selections(row.source, row.token) + lane_index());
      now = Selection::unpack(cell.payload);
      if (Selection::epoch_in(cell) < reach.epoch) return false;
      const std::uint32_t theirs = Selection::call_in(cell);
      if (theirs == call) return true;
      refuse_call(params.common, reach.epoch, row.source, 0, call, theirs);
      return false;
    }
    if (!reach.has_announced(row.source)) return false;
    const FarSelections announced{params, reach.far_selections(row.source)};
    if (row.index == 0 && lane_index() == 0) announced.check_call(reach, row.source);
    // By rails the row goes to another rank, which has to have made room, too: nearly always long ago.
    if (reach.by_rails() && !reach.has_rail_to(row.source) &&
        !reach.has_room(reach.load_acknowledged(reach.relay_of(row.source)))) {
      return false;
    }
    now = announced.selection(row.token, lane_index());
    return true;
  }

  /// From `begin` until now the group has waited for `source`. Returns now.
  DEEP_EP_DEVICE std::int64_t count_wait(int source, std::int64_t begin) const {
    if (params.wait_cost == nullptr) return 0;
    const std::int64_t now = clock_cycles();
    if (warp == 0 && lane_index() == 0) add_relaxed<Scope::gpu>(params.wait_cost + source, now - begin);
    return now;
  }

  /// Is `source` left out? When its time has run out, it is from now on (or the call ends).
  DEEP_EP_DEVICE bool gives_up(const Reach& reach, int source, std::uint64_t start) const {
    if (lane_index() == 0 && !masked(params.common, source)) {
      const bool announced = reach.by_rails() && reach.is_far(source) && reach.has_announced(source);
      const Awaited missing = announced
                                  ? Awaited{reach.relay_of(source), Wanted::low_latency_combine_credit, reach.epoch - 2}
                                  : Awaited{source, Wanted::low_latency_combine_selection, reach.epoch};
      if (reach.policy().is_late(missing, start)) reach.policy().blame(missing, 0);
    }
    warp::sync();
    return left_out(source);
  }

  /// Sends this warp's share of the row to its owner: the weighted sum of the rows that the dispatch brought. False:
  /// the owner has not announced its selections yet.
  ///
  /// A thread has as many loads in flight as registers allow, whether they are many vectors of one row or few of many.
  /// The first ones start before the owner has announced which of these rows it wants: nearly always all of them.
  DEEP_EP_DEVICE bool push(const Reach& reach, const CombineRow& row, std::uint64_t patience_ns,
                           std::uint64_t start) const {
    const WarpShare share{warp, params.warps_per_row};
    const int steps = share.steps(wire);
    std::byte* const to = destination(reach, row);
    CombineChoice choice{};
    bool chosen = false;
    std::uint32_t rows = warp::ballot(row.position >= 0);

    // Step by step, and row by row within one: what is loaded next, and what is added next.
    std::uint32_t rows_to_load = rows, rows_to_add = rows;
    int step_to_load = 0, step_to_add = 0, step_to_store = 0;
    float sum[8] = {};
    int pieces = steps * count_bits(rows);
    int piece = 0;
#pragma unroll 1
    do {
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        const std::int64_t from = warp::shuffle(row.position, lowest_bit(rows_to_load));
        const int vector = share.vector(wire, step_to_load);
        if (vector >= 0) {
          loaded[i] = load_stream(reinterpret_cast<const Vec16*>(params.x) + from * wire.vectors() + vector);
        }
        rows_to_load &= rows_to_load - 1;
        if (rows_to_load != 0) continue;
        rows_to_load = rows;
        ++step_to_load;
      }
      if (!chosen) {
        chosen = true;
        if (!await_choice(reach, row, patience_ns, start, choice)) return false;
        if (choice.rows != rows) {  // rare: begins again with the rows that are left
          rows = rows_to_load = rows_to_add = choice.rows;
          pieces = steps * count_bits(rows);
          step_to_load = 0;
          if (rows != 0) continue;
        }
        if (rows == 0) break;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        add_weighted(sum, loaded[i], warp::shuffle(choice.weight, lowest_bit(rows_to_add)));
        rows_to_add &= rows_to_add - 1;
        if (rows_to_add != 0) continue;
        if (share.vector(wire, step_to_add) >= 0) *share.staged(stage, step_to_add) = pack_sum(sum);
        for (float& part : sum) part = 0.0f;
        rows_to_add = rows;
        ++step_to_add;
      }
      piece += kTogether;
      if (step_to_store < step_to_add) warp::sync();  // the sums are in the stage
#pragma unroll 1
      for (; step_to_store < step_to_add; ++step_to_store) store(share, step_to_store, to, reach.epoch);
    } while (piece < pieces);
    if (rows == 0 && choice.owed) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        if (share.vector(wire, step) >= 0) *share.staged(stage, step) = Vec16{};
        warp::sync();
        store(share, step, to, reach.epoch);
      }
    }
    warp::sync();  // the stage has been read
    if (reach.is_far(row.source) && !reach.by_rails()) reach.hand_over(row.source, row.index, warp, choice.owed);
    return true;
  }

  /// In tagged lines: in the window of the owner, or of the rank that adds up the rows for it; or where a poster finds
  /// it.
  DEEP_EP_DEVICE std::byte* destination(const Reach& reach, const CombineRow& row) const {
    const LowLatencyParams& common = params.common;
    const int owner = row.source;
    if (!reach.is_far(owner)) return reach.row(common.heaps[owner], common.rank, row.token);
    if (!reach.by_rails()) return reach.staged_row(owner, row.index).in(common.local);
    return reach.row_of_member(common.heaps[reach.relay_of(owner)], owner, common.rank, row.token);
  }

  /// Sends the owner what a step has completed.
  DEEP_EP_DEVICE void store(const WarpShare& share, int step, std::byte* to, std::uint64_t epoch) const {
    const LineLane lane;
    const auto line = static_cast<std::uint32_t>(share.unit(step) * kWarpLines + lane.line);
    const std::byte* from = stage + static_cast<std::size_t>(step) * kWarpLines * kTaggedPayload;
    const LinePart part = tagged_part(from, static_cast<std::uint32_t>(lane.line), epoch);
    store_line(to + lane.byte_at(line), part, line < wire.lines());
  }
};

}  // namespace deep_ep::device::low_latency
