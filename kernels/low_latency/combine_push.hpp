// The expert side of combine: for each row that the dispatch brought, what this rank's experts made of the token,
// weighted, summed and rounded, goes to the token's owner as one row.
//
// Groups of warps take rows in turn. Neighbouring rows belong to different owners, so that all links are busy at once,
// and every owner's rows go in token order, so that it can begin to add. In a group, one warp leads: it waits for the
// owner's selections and, when the others have summed, stores the row and raises its flag. The others only load and
// add; with two stages they make the next row while the last one is on its way.
#pragma once

#include "kernels/low_latency/combine_choose.hpp"
#include "kernels/low_latency/combine_sum.hpp"
#include "kernels/low_latency/peer.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device::low_latency {

struct CombineGroup {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  int group, groups;  ///< in the block
  int warp;           ///< in the group: 0 leads
  CombineChoice& choice;
  std::byte* stages;
  std::uint32_t stage_bytes;
  std::uint64_t epoch = 0;

  /// Meetings of a group: a choice is made (and a stage free), a row is summed, its parts are summed (LogFMT only).
  enum Meeting : int { kChosen, kSummed, kPartsSummed };

  /// `begin()` meets the block and sets the epoch; what does not depend on it is loaded before.
  template <class Begin>
  DEEP_EP_DEVICE void push_all(Begin begin) {
    const CombineRow first = load_row(first_item());
    const std::int32_t most = load_most_rows();
    begin(epoch);
    const int end = warp::max(most) * params.common.num_ranks;
    if (warp == 0) {
      OnItsWay last{};
      each_row(first, end, [&](const CombineRow& row, const std::byte* stage) { return lead(row, stage, last); });
      raise_flag(last);
    } else {
      each_row(first, end, [&](const CombineRow& row, std::byte* stage) { return sum(row.position, stage); });
    }
  }

 private:
  /// A row whose flag is still to be raised.
  struct OnItsWay {
    bool any;
    int owner;
    std::int32_t token;
  };

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

  /// Calls `work` for the rows that fall to this group, and the stages in turn, until it says false. What is known of
  /// the next row is loaded meanwhile.
  template <class Work>
  DEEP_EP_DEVICE void each_row(CombineRow next, int end, Work work) const {
    const int step = groups * grid_blocks();
    int item = first_item();
    std::byte* stage = stages;
    while (item < end) {
      const CombineRow row = next;
      item += step;
      next = load_row(item);
      if (row.index >= row.rows) continue;
      if (!work(row, stage)) return;
      if (params.stages > 1) stage = stage == stages ? stages + stage_bytes : stages;
    }
  }

  /// The first warp's part in a row. False after a fault.
  DEEP_EP_DEVICE bool lead(const CombineRow& row, const std::byte* stage, OnItsWay& last) const {
    RowChooser{params, epoch}.choose(row, choice);
    warp::sync();
    const CombineChoice::Kind kind = choice.kind;
    if (params.stages == 1) raise_flag(last);  // which says that the stage is free
    arrive(kChosen);
    if (kind == CombineChoice::stop) return false;
    if (params.stages > 1) raise_flag(last);
    sync(kSummed);
    if (kind == CombineChoice::none) return true;
    if (lane_index() == 0) store(row, stage);
    last = {true, row.source, row.token};
    return true;
  }

  /// The other warps' part.
  DEEP_EP_DEVICE bool sum(std::int32_t position, std::byte* stage) const {
    const int warps = params.warps_per_row - 1;
    const RowSummer summer{reinterpret_cast<const Vec16*>(params.x), wire.vectors(),
                           (warp - 1) * kWarpSize + lane_index(), warps * kWarpSize};
    summer.sum(position, choice, reinterpret_cast<Vec16*>(stage + wire.ranges_bytes()), [&] { sync(kChosen); });
    if (choice.kind == CombineChoice::stop) return false;
    if (wire.logfmt) {
      block::sync(barrier(kPartsSummed), warps * kWarpSize);
      if (choice.kind != CombineChoice::none) encode_row(wire, stage, warp - 1, warps);
    }
    bulk::publish(stage, wire.bytes());
    arrive(kSummed);
    return true;
  }

  /// From the stage to the owner.
  DEEP_EP_DEVICE void store(const CombineRow& row, const std::byte* stage) const {
    const LowLatencyParams& common = params.common;
    const Peer owner{common.heaps[row.source]};
    const std::size_t at =
        common.window.row_at(LowLatencyKind::combine, epoch, common.rank, row.token, params.row_bytes);
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
    const LowLatencyParams& common = params.common;
    if (row.any && lane_index() == 0) {
      Peer{common.heaps[row.owner]}.signal_after_puts(
          common.window.flag_at(LowLatencyKind::combine, epoch, common.rank, row.token), epoch);
    }
    row.any = false;
  }
};

}  // namespace deep_ep::device::low_latency
