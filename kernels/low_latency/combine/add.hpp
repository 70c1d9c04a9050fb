// The owner's side of combine: the rows of a token, one from each rank that has a part in it, are added in fp32, by
// rank, and rounded.
//
// By rails each other node has one row, which the owner's rail there adds up from those of its node, in the same way.
//
// A block takes a token, and its warps share the token's lines. Each warp finds out for itself which ranks have a row,
// and polls its lines of all those rows at once: they are in its registers as soon as they have arrived.
#pragma once

#include <type_traits>

#include "kernels/common/line_poller.hpp"
#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/combine/fp8.hpp"
#include "kernels/low_latency/transport/reach.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

/// The ranks that have a row of a token, in their order, one in each lane.
struct CombineSources {
  int count;
  int rank;              ///< in lane i < count the i-th
  const std::byte* row;  ///< its row
};

/// Whose tokens a rank adds up: its own, or, by rails, those of a rank of another node. Then it adds up the rows of its
/// own node, and that rank gets the sum.
struct CombineTask {
  int owner;
  int num_tokens;
  bool relays;
};

template <bool kFp8, bool kRdma>
struct CombineAdder {
  static constexpr bool kRails = kRdma && !kFp8;
  using Reach = CombineReach<kRdma, kRails>;
  using Sum = std::conditional_t<kFp8, Fp8LineSum, Bf16LineSum>;
  static constexpr int kTogether = 8;  ///< rows that are polled at once, four lines of each
  using Lines = LinePoller<kTogether>;

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  Reach reach;
  int warp;
  Divisor warps;  ///< of the block

  /// Adds up every `step`-th token from `first` on. By rails first the tokens of other nodes' ranks, whose
  /// sums have further to go.
  DEEP_EP_DEVICE void add_all(int first, int step) const {
#pragma unroll 1
    for (int turn = 0; turn < reach.turns(); ++turn) {
      CombineTask task{params.common.rank, params.num_tokens, false};
      if constexpr (kRails) {
        task.owner = reach.owner_of_turn(turn);
        task.relays = task.owner != params.common.rank;
        if (task.relays) {
          if (!reach.await_announced(task.owner)) return;
          task.num_tokens = FarSelections{params, reach.far_selections(task.owner)}.count(reach, task.owner);
        }
      }
      if (!add_tokens(task, first, step)) return;
    }
  }

  /// The task's tokens among these. False: the call is over.
  DEEP_EP_DEVICE bool add_tokens(const CombineTask& task, int first, int step) const {
#pragma unroll 1
    for (int token = first; token < task.num_tokens; token += step) {
      CombineSources sources = find_sources(task, token);
#pragma unroll 1
      while (!await_rows(token, sources)) {
        if (warp::any(aborted(params.common.wait))) return false;
        sources = find_sources(task, token);  // without those that are masked now
      }
      if (!add_lines(task, token, sources)) return false;
    }
    return task.num_tokens >= 0;
  }

 private:
  /// Waits for the rows whose tags cannot be trusted. False if one does not come.
  DEEP_EP_DEVICE bool await_rows(int token, const CombineSources& sources) const {
    if (!kRdma) return true;
    bool there = true;
    if (sources.rank >= 0) {
      const std::int64_t begin = clock_cycles();
      there = reach.await_row(sources.rank, token);
      if (measures(warp) && reach.is_far(sources.rank)) {
        add_relaxed<Scope::gpu>(params.wait_cost + sources.rank, clock_cycles() - begin);
      }
    }
    return warp::agree(there);
  }

  /// In each lane the rank whose row the lane's selection of the token is a part of; -1: of none. By rails an owner has
  /// one row for all ranks of another node, and a relay adds those of its own.
  DEEP_EP_DEVICE int rank_of_selection(const CombineTask& task, int token) const {
    const int lane = lane_index();
    if (lane >= params.num_topk) return -1;
    if constexpr (kRails) {
      if (task.relays) {
        const int rank = FarSelections{params, reach.far_selections(task.owner)}.rank_of_selection(token, lane);
        return rank >= 0 && reach.is_of_own_node(rank) ? rank : -1;
      }
    }
    return reach.speaker_of(Selections{params}.rank_of_selection(token, lane));
  }

  DEEP_EP_DEVICE CombineSources find_sources(const CombineTask& task, int token) const {
    const LowLatencyParams& common = params.common;
    const int lane = lane_index();
    const int rank = rank_of_selection(task, token);

    // Of the selections on one rank, the first stands for it; it comes after those on lower ranks.
    const bool first = lowest_bit(warp::match_any(static_cast<std::uint32_t>(rank))) == lane && rank >= 0;
    const std::uint32_t wanted = warp::ballot(first && !masked(common, rank));
    int place = 0;
#pragma unroll 1
    for (std::uint32_t left = wanted; left != 0; left &= left - 1) {
      place += warp::shuffle(rank, lowest_bit(left)) < rank ? 1 : 0;
    }
    CombineSources sources{count_bits(wanted), -1, nullptr};
#pragma unroll 1
    for (std::uint32_t left = wanted; left != 0; left &= left - 1) {
      const int from = lowest_bit(left);
      const int its_rank = warp::shuffle(rank, from);
      if (warp::shuffle(place, from) == lane) sources.rank = its_rank;
    }
    if (sources.rank >= 0) sources.row = reach.row_from(task.owner, sources.rank, token);
    return sources;
  }

  /// Waits for line `line` of each lane, of `count` rows: `sources` has them from lane `first` on. In the end
  /// `lines.missing` says which do not come because their ranks are masked. False: the call is over.
  DEEP_EP_DEVICE bool await(const CombineSources& sources, int first, int count, std::uint32_t line, bool measures,
                            Lines& lines) const {
    const bool is_line = line < wire.lines();
    const std::uint32_t at = LineLane().byte_at(line);
    lines.missing = (1u << count) - 1;
    std::uint32_t lost = 0;
    const std::int64_t cycles = clock_cycles();
    const auto all_there = [&](const Poll& look) {
      const std::uint32_t before = lines.missing;
      const bool there = lines.poll(
          ~lost, look.thorough, reach.epoch, [&](int i) { return warp::shuffle(sources.row, first + i) + at; },
          [&](int) { return is_line; });
      if (measures) measure(sources, first, before & ~lines.missing, cycles);
      return there;
    };
    const auto gives_up = [&](const Poll& look) {
#pragma unroll 1
      for (std::uint32_t left = lines.missing & ~lost; left != 0; left &= left - 1) {
        const int i = lowest_bit(left);
        const Awaited row{warp::shuffle(sources.rank, first + i), Wanted::low_latency_combine_rows, reach.epoch};
        if (lane_index() == 0 && !masked(params.common, row.peer) && reach.policy().is_late(row, look.begin)) {
          reach.policy().blame(row, 0);
        }
        warp::sync();
        if (warp::any(masked(params.common, row.peer))) lost |= 1u << i;
      }
      return warp::any(aborted(params.common.wait));
    };
    return poll_until(all_there, gives_up);
  }

  /// Of the rows that have come.
  DEEP_EP_DEVICE void measure(const CombineSources& sources, int first, std::uint32_t came, std::int64_t begin) const {
    const int i = lane_index() - first;
    if (i < 0 || i >= kTogether || (came >> i & 1u) == 0) return;
    add_relaxed<Scope::gpu>(params.wait_cost + sources.rank, clock_cycles() - begin);
  }

  DEEP_EP_DEVICE bool measures(int unit) const { return params.wait_cost != nullptr && unit == 0; }
  DEEP_EP_DEVICE std::byte* result(int token) const {
    return params.combined_x + std::int64_t{token} * 2 * params.hidden;
  }

  DEEP_EP_DEVICE bool add_lines(const CombineTask& task, int token, const CombineSources& sources) const {
    const LineLane lane;
    const int steps = (Sum::units(wire) - warp + warps - 1) / warps;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int unit = warp + step * warps;
      const auto line = static_cast<std::uint32_t>(unit * kWarpLines + lane.line);
      Sum sum;
#pragma unroll 1
      for (int first = 0; first < sources.count; first += kTogether) {
        Lines lines;
        const int count = sources.count - first < kTogether ? sources.count - first : kTogether;
        if (!await(sources, first, count, line, measures(unit), lines)) return false;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i < sources.count && (lines.missing >> i & 1u) == 0) sum.add(lines.part[i], line);
        }
      }
      if constexpr (kRails) {
        if (task.relays) {
          if (sources.count != 0) stage_line(task, token, line, sum.packed());
          continue;
        }
      }
      sum.store(result(token), wire, line);
    }
    if constexpr (kRails) {
      if (task.relays && sources.count != 0) reach.hand_over_sum(task.owner, token, warp);
    }
    return true;
  }

  /// By rails: stores a line of the node's sum where a poster fetches it.
  DEEP_EP_DEVICE void stage_line(const CombineTask& task, int token, std::uint32_t line, const Vec16& packed) const {
    const LineLane lane;
    const LinePart part{{std::uint64_t{packed.word[1]} << 32 | packed.word[0],
                         lane.has_tag() ? reach.epoch : std::uint64_t{packed.word[3]} << 32 | packed.word[2]}};
    store_line(reach.staged_row(task.owner, token) + lane.byte_at(line), part, line < wire.lines());
  }
};

}  // namespace deep_ep::device::low_latency
