// The expert side of combine: for each row that the dispatch brought, what this rank's experts made of the token,
// weighted, summed and rounded, goes to the token's owner as one row.
//
// Groups of warps take rows in turn. Neighbouring rows belong to different owners, so that all links are busy at once,
// and every owner's rows go in token order, so that it can begin to add. In a group, one warp leads: it looks for the
// owner's selections and, when the others have summed, stores the row and raises its flag. The others only load and
// add; with two stages they make the next row while the last one is on its way. Rows whose owner has not told its
// selections for a while are put off until all others are done: a rank that does not come must not make others look
// late.
#pragma once

#include "kernels/low_latency/combine_choose.hpp"
#include "kernels/low_latency/combine_sum.hpp"
#include "kernels/low_latency/combine_wait.hpp"
#include "kernels/low_latency/peer.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device::low_latency {

struct CombineGroup {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  int group, groups;  ///< in the block
  int warp;           ///< in the group: 0 leads
  const CombineGroupLayout& layout;
  std::byte* memory;
  std::uint64_t epoch = 0;

  /// Meetings of a group: a choice is made (and a stage free), a row is summed, its parts are summed (LogFMT only).
  enum Meeting : int { kChosen, kSummed, kPartsSummed };

  /// How long rows wait in turn for their owner, in nanoseconds. Where ranks are masked, a late one should cost little;
  /// else the call needs all ranks anyway, and it matters only who is named in the end.
  DEEP_EP_DEVICE std::uint64_t patience() const {
    const LowLatencyParams& common = params.common;
    if (common.mask != nullptr) return 50'000;
    return common.wait.timeout_ns == 0 ? ~std::uint64_t{0} : common.wait.timeout_ns / 4;
  }

  /// `begin()` meets the block and sets the epoch; what does not depend on it is loaded before.
  template <class Begin>
  DEEP_EP_DEVICE void push_all(Begin begin) {
    const CombineRow first = load_row(first_item());
    const std::int32_t most = load_most_rows();
    begin(epoch);
    const int end = warp::max(most) * params.common.num_ranks;
    if (warp == 0) {
      lead_all(first, end);
    } else {
      sum_all(first, end);
    }
  }

 private:
  /// A row whose flag is still to be raised.
  struct OnItsWay {
    std::byte* owner = nullptr;  ///< nullptr: none
    std::size_t flag_at = 0;
  };

  DEEP_EP_DEVICE CombineChoice& choice() const {
    return *reinterpret_cast<CombineChoice*>(memory + layout.choice_at());
  }
  /// Of each row that falls to this group: has it been put off?
  DEEP_EP_DEVICE std::uint32_t* put_off() const {
    return reinterpret_cast<std::uint32_t*>(memory + layout.put_off_at());
  }
  DEEP_EP_DEVICE std::byte* other(std::byte* stage) const {
    return layout.stages > 1 && stage == memory ? memory + layout.stage_bytes() : memory;
  }

  DEEP_EP_DEVICE int threads() const { return params.warps_per_row * kWarpSize; }
  DEEP_EP_DEVICE int barrier(Meeting meeting) const { return 2 + group * (wire.logfmt ? 3 : 2) + meeting; }
  DEEP_EP_DEVICE void sync(Meeting meeting) const { block::sync(barrier(meeting), threads()); }
  DEEP_EP_DEVICE void arrive(Meeting meeting) const { block::arrive(barrier(meeting), threads()); }
  DEEP_EP_DEVICE RowTable table() const {
    return {const_cast<std::int32_t*>(params.row_table), params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * grid_blocks() + block_index(); }

  /// The most rows that this lane's sources have.
  DEEP_EP_DEVICE std::int32_t load_most_rows() const {
    std::int32_t most = 0;
    for (int source = lane_index(); source < params.common.num_ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(table().rows(source));
      most = rows > most ? rows : most;
    }
    return most;
  }

  /// Loads what there may be to know of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const int ranks = params.common.num_ranks;
    CombineRow row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in another order each time: otherwise a group could meet the same one always.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_stream(table().rows(row.source));
    row.token = load_stream(table().token(row.source, row.index));
    row.position = -1;
    if (params.rank_major) {
      if (lane_index() == 0) row.position = row.source * params.max_tokens + row.index;
    } else if (lane_index() < params.num_topk) {
      row.position = load_stream(table().position(row.source, row.index, lane_index()));
    }
    return row;
  }

  DEEP_EP_DEVICE int step() const { return groups * grid_blocks(); }

  /// The first warp: all rows in turn, meeting the others at each; then again and again those that were put off.
  DEEP_EP_DEVICE void lead_all(CombineRow next, int end) const {
    if (lane_index() == 0) choice().begin = now_ns();
    warp::sync();
    OnItsWay last;
    std::byte* stage = memory;
    int waiting = 0;
    int pass = 0;
    do {
      for (int index = 0, item = first_item(); item < end; ++index, item += step()) {
        CombineRow row = next;
        if (pass == 0) {
          if (index % 32 == 0) set_bits(index, 0);
          next = load_row(item + step());
          if (row.index >= row.rows) continue;
        } else {
          if ((put_off()[index / 32] & bit(index)) == 0) continue;
          row = load_row(item);
        }
        const bool known = !(pass == 0 ? left_out(row.source) : gives_up(row.source)) && choose_soon(row, last);
        const bool late = !known && !left_out(row.source);
        if (late != (pass > 0)) {
          set_bits(index, put_off()[index / 32] ^ bit(index));
          waiting += late ? 1 : -1;
        }
        if (pass > 0 && !known) continue;
        meet_and_store(row, known, pass > 0, stage, last);
        stage = other(stage);
      }
      raise_flag(last);
      pause(++pass);
    } while (waiting > 0 && !warp::any(aborted(params.common.wait)));
    if (lane_index() == 0) choice().kind = CombineChoice::stop;
    arrive(kChosen);
  }

  DEEP_EP_DEVICE static std::uint32_t bit(int index) { return 1u << (index % 32); }
  DEEP_EP_DEVICE void set_bits(int index, std::uint32_t bits) const {
    warp::sync();
    if (lane_index() == 0) put_off()[index / 32] = bits;
    warp::sync();
  }

  /// The same for all lanes, even while another warp masks the rank.
  DEEP_EP_DEVICE bool left_out(int source) const { return warp::any(masked(params.common, source)); }

  /// Makes the choice if the owner tells its selections in a while: one that is hardly late is waited for, so that what
  /// was loaded in advance is of use. False after a fault, too.
  DEEP_EP_DEVICE bool choose_soon(const CombineRow& row, OnItsWay& last) const {
    for (int spins = 1;; ++spins) {
      if (RowChooser{params, epoch}.choose(row, choice())) return true;
      raise_flag(last);  // rather than let its owner wait, too
      if (!warp::any(now_ns() - choice().begin < patience())) return false;
      if (spins % 64 == 0 && warp::any(aborted(params.common.wait))) return false;
      pause(spins);
    }
  }

  /// Is `source` left out? When its time has run out, it is from now on (or the call ends).
  DEEP_EP_DEVICE bool gives_up(int source) const {
    const LowLatencyParams& common = params.common;
    if (lane_index() == 0 && !masked(common, source) && is_late(common, source, epoch, choice().begin)) {
      blame(common, source, Wanted::low_latency_combine_selection, epoch, 0);
    }
    warp::sync();
    return left_out(source);
  }

  /// Meets the others, who sum what was chosen, and stores the row. `unforeseen`: they know nothing of it.
  DEEP_EP_DEVICE void meet_and_store(const CombineRow& row, bool known, bool unforeseen, const std::byte* stage,
                                     OnItsWay& last) const {
    if (lane_index() == 0) {
      if (!known) choice().kind = CombineChoice::none;
      if (unforeseen && choice().kind == CombineChoice::as_dispatched) choice().kind = CombineChoice::others;
    }
    warp::sync();
    const bool sent = choice().kind != CombineChoice::none;
    if (layout.stages == 1) raise_flag(last);  // which says that the stage is free
    arrive(kChosen);
    raise_flag(last);
    // Whatever needs loads or arithmetic, while the others sum.
    const LowLatencyParams& common = params.common;
    std::byte* owner = common.heaps[row.source];
    const std::size_t at =
        common.window.row_at(LowLatencyKind::combine, epoch, common.rank, row.token, params.row_bytes);
    const std::size_t flag_at = common.window.flag_at(LowLatencyKind::combine, epoch, common.rank, row.token);
    sync(kSummed);
    if (!sent) return;
    if (lane_index() == 0) store(Peer{owner}, at, stage);
    last = {owner, flag_at};
  }

  /// The other warps, until the first has no more rows. What is known of the next row is loaded meanwhile.
  DEEP_EP_DEVICE void sum_all(const CombineRow& first, int end) const {
    std::byte* stage = memory;
    std::int32_t next = first.position;
    bool next_there = first.index < first.rows;
    int item = first_item();
    for (;;) {
      std::int32_t position = -1;  // later rows: whatever is chosen
      if (item < end) {
        position = next;
        const bool there = next_there;
        item += step();
        const CombineRow row = load_row(item);
        next = row.position;
        next_there = row.index < row.rows;
        if (!there) continue;
      }
      if (!sum(position, stage)) return;
      stage = other(stage);
    }
  }

  /// The other warps' part.
  DEEP_EP_DEVICE bool sum(std::int32_t position, std::byte* stage) const {
    const int warps = params.warps_per_row - 1;
    const RowSummer summer{reinterpret_cast<const Vec16*>(params.x), wire.vectors(),
                           (warp - 1) * kWarpSize + lane_index(), warps * kWarpSize};
    summer.sum(position, choice(), reinterpret_cast<Vec16*>(stage + wire.ranges_bytes()), [&] { sync(kChosen); });
    if (choice().kind == CombineChoice::stop) return false;
    if (wire.logfmt) {
      block::sync(barrier(kPartsSummed), warps * kWarpSize);
      if (choice().kind != CombineChoice::none) encode_row(wire, stage, warp - 1, warps);
    }
    bulk::publish(stage, wire.bytes());
    arrive(kSummed);
    return true;
  }

  /// From the stage to the owner.
  DEEP_EP_DEVICE void store(const Peer& owner, std::size_t at, const std::byte* stage) const {
    if (!wire.logfmt) return owner.put(at, stage, wire.bytes());
    const auto* ranges = reinterpret_cast<const std::uint32_t*>(stage);
    owner.put(at, stage, wire.ranges_bytes());
    for (int chunk = 0; chunk < wire.chunks(); ++chunk) {
      const bool encoded = (ranges[chunk * wire.chunk() / logfmt::kGroup] & kEncoded) != 0;
      const auto width = static_cast<std::uint32_t>(wire.chunk_width(chunk));
      owner.put(at + wire.chunk_at(chunk), stage + wire.chunk_at(chunk), encoded ? width * 10 / 8 : width * 2);
    }
  }

  /// Once the row has arrived.
  DEEP_EP_DEVICE void raise_flag(OnItsWay& row) const {
    if (row.owner != nullptr && lane_index() == 0) Peer{row.owner}.signal_after_puts(row.flag_at, epoch);
    row.owner = nullptr;
  }
};

}  // namespace deep_ep::device::low_latency
