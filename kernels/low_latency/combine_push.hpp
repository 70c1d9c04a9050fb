// The expert side of combine: for each row that the dispatch brought, what this rank's experts made of the token,
// weighted, summed and rounded, goes to the token's owner as one row.
//
// Groups of warps take rows in turn. Neighbouring rows belong to different owners, so that all links are busy at once,
// and every owner's rows go in token order, so that it can begin to add.
#pragma once

#include "kernels/low_latency/combine_announce.hpp"
#include "kernels/low_latency/combine_shared.hpp"
#include "kernels/low_latency/combine_sum.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device::low_latency {

struct CombinePusher {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  std::uint64_t epoch;
  int group, groups;  ///< in the block
  int thread;         ///< in the group
  CombineChoice& choice;
  std::byte* stage;

  /// A received row, as a warp remembers it.
  struct Row {
    int source, index;
    std::int32_t rows;      ///< of the source; the row is there if `index` is below
    std::int32_t token;     ///< at the source
    std::int32_t position;  ///< in each lane that of a selection, negative: not on this rank
  };

  DEEP_EP_DEVICE void push_all() const {
    const int step = groups * grid_blocks();
    // Block by block rather than group by group: with few rows every SM has some.
    int item = group * grid_blocks() + block_index();
    Row next = load_row(item);
    const int end = most_rows() * params.common.num_ranks;
    while (item < end) {
      const Row row = next;
      item += step;
      next = load_row(item);
      if (row.index < row.rows && !push(row)) return;
    }
  }

 private:
  DEEP_EP_DEVICE int threads() const { return params.warps_per_row * kWarpSize; }
  DEEP_EP_DEVICE void sync() const { block::sync(2 + group, threads()); }
  DEEP_EP_DEVICE RowTable table() const {
    return {const_cast<std::int32_t*>(params.row_table), params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  DEEP_EP_DEVICE int most_rows() const {
    std::int32_t most = 0;
    for (int source = lane_index(); source < params.common.num_ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(table().rows(source));
      most = rows > most ? rows : most;
    }
    return warp::max(most);
  }

  /// Loads what there may be to know of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE Row load_row(int item) const {
    const int ranks = params.common.num_ranks;
    Row row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in another order each time: otherwise a group could meet the same one always.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_stream(table().rows(row.source));
    row.token = load_stream(table().token(row.source, row.index));
    const int lane = lane_index();
    row.position = -1;
    if (params.rank_major) {
      if (lane == 0) row.position = row.source * params.max_tokens + row.index;
    } else if (lane < params.num_topk) {
      row.position = load_stream(table().position(row.source, row.index, lane));
    }
    return row;
  }

  /// False after a fault.
  DEEP_EP_DEVICE bool push(const Row& row) const {
    const RowSummer summer{reinterpret_cast<const Vec16*>(params.x),
                           wire.vectors(),
                           reinterpret_cast<Vec16*>(stage + wire.ranges_bytes()),
                           thread,
                           threads(),
                           choice};
    const bool summed = summer.sum(row.position, [&] {
      if (thread < kWarpSize) choose(row);
      sync();
      return choice.kind == CombineChoice::as_dispatched;
    });
    if (!summed) {
      if (choice.kind == CombineChoice::none) return leave_out();
      summer.sum(lane_index() < choice.count ? choice.position[lane_index()] : -1, [] { return true; });
    }
    if (wire.logfmt) {
      sync();
      encode_row(wire, stage, thread / kWarpSize, params.warps_per_row);
    }
    bulk::publish(stage, wire.bytes());
    sync();
    if (thread == 0) store(row);
    return true;
  }

  /// Everybody has seen that the row is left out, before the next choice is made. False when the reason is a fault.
  DEEP_EP_DEVICE bool leave_out() const {
    sync();
    return !aborted(params.common.wait);
  }

  /// From the stage to the owner, then the flag. The next row is summed only when the stage is free again.
  DEEP_EP_DEVICE void store(const Row& row) const {
    const LowLatencyParams& common = params.common;
    const Peer owner{common.heaps[row.source]};
    const std::size_t at = common.window.row_at(LowLatencyKind::combine, epoch, common.rank, row.token,
                                                params.max_tokens, params.row_bytes);
    if (wire.logfmt) {
      const auto* ranges = reinterpret_cast<const std::uint32_t*>(stage);
      owner.put(at, stage, wire.ranges_bytes());
      for (int chunk = 0; chunk < wire.chunks(); ++chunk) {
        const bool encoded = (ranges[chunk * wire.chunk() / logfmt::kGroup] & kEncoded) != 0;
        const auto width = static_cast<std::uint32_t>(wire.chunk_width(chunk));
        owner.put(at + wire.chunk_at(chunk), stage + wire.chunk_at(chunk), encoded ? width * 10 / 8 : width * 2);
      }
    } else {
      owner.put(at, stage, wire.bytes());
    }
    owner.signal_after_puts(common.window.flag_at(LowLatencyKind::combine, epoch, common.rank, row.token), epoch);
  }

  /// By the first warp: waits for the owner's selections and finds the rows that they mean.
  DEEP_EP_DEVICE void choose(const Row& row) const {
    const LowLatencyParams& common = params.common;
    const int lane = lane_index();
    bool there = !masked(common, row.source);
    Selection now{-1, 0.0f};
    if (there && lane < params.num_topk) {
      const auto* cells = reinterpret_cast<const Cell*>(
          common.local + common.window.selections_at(epoch, row.source, row.token));
      std::uint64_t payload = 0;
      there = wait_for_cell(common, cells + lane, epoch, row.source, Wanted::low_latency_combine_selection, payload);
      now = Selection::unpack(payload);
    }
    if (!warp::all(there)) {
      if (lane == 0) choice.kind = CombineChoice::none;
      return;
    }
    const int first_expert = common.rank * params.num_local_experts;
    const int expert = now.expert - first_expert;  // local
    const bool here = now.expert >= first_expert && expert < params.num_local_experts;
    if (params.rank_major) {
      choose_sum(row, warp::any(here));
    } else {
      choose_experts(row, here ? expert : -1, now.weight);
    }
  }

  /// The row is the sum already: all of it, or nothing.
  DEEP_EP_DEVICE void choose_sum(const Row& row, bool wanted) const {
    if (lane_index() != 0) return;
    choice.kind = wanted ? CombineChoice::as_dispatched : CombineChoice::none;
    choice.count = 1;
    choice.position[0] = row.position;
    choice.weight[0] = 1.0f;
  }

  /// `expert`: in each lane the local expert of a selection, or -1. Each means the row that the dispatch brought for
  /// the same selection if that named the same expert, else the first that the dispatch brought for this expert.
  DEEP_EP_DEVICE void choose_experts(const Row& row, int expert, float weight) const {
    const int lane = lane_index();
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    const int dispatched = row.position >= 0 ? row.position / expert_rows : -1;
    const bool same = warp::all(expert == dispatched);
    std::int32_t position = expert < 0 ? -1 : row.position;
    if (!same) {
      if (expert != dispatched) position = -1;
      for (int k = 0; k < params.num_topk; ++k) {
        const int candidate = warp::shuffle(dispatched, k);
        const std::int32_t its_row = warp::shuffle(row.position, k);
        if (position < 0 && expert >= 0 && candidate == expert) position = its_row;
      }
    }
    const std::uint32_t chosen = warp::ballot(position >= 0);
    if (position >= 0) {
      const int place = count_bits(chosen & ((1u << lane) - 1));
      choice.position[place] = position;
      choice.weight[place] = weight;
    }
    if (lane == 0) {
      choice.count = count_bits(chosen);
      choice.kind = chosen == 0 ? CombineChoice::none : same ? CombineChoice::as_dispatched : CombineChoice::others;
    }
  }
};

}  // namespace deep_ep::device::low_latency
