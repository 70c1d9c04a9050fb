// What both kernels of the low-latency combine share: rows as they travel, what the owner of tokens selects, shared
// memory of a block, how it learns which call it is in, and the rows that the dispatch brought.
#pragma once

#include <cmath>

#include "kernels/common/row_sum.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device::low_latency {

/// A row of combine as it travels from an expert rank to the token's owner: tagged lines with vectors of bfloat16.
struct CombineWire {
  int hidden;

  DEEP_EP_HOST_DEVICE int vectors() const { return hidden / 8; }
  DEEP_EP_HOST_DEVICE std::uint32_t lines() const { return tagged_lines(2 * static_cast<std::uint32_t>(hidden)); }
  /// In the window.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return lines() * kTaggedLine; }
  /// Of four lines: what a warp works on at once.
  DEEP_EP_DEVICE int pieces() const { return (static_cast<int>(lines()) + kWarpLines - 1) / kWarpLines; }

  /// The vector of the row that the lane has in a line; -1: none.
  DEEP_EP_DEVICE int vector(std::uint32_t line) const {
    const int vector = LineLane().vector(line);
    return vector < vectors() ? vector : -1;
  }
  /// By a whole warp: stores the lane's part of a line into the row at `to`.
  DEEP_EP_DEVICE void store(std::byte* to, std::uint32_t line, const Vec16& vector, std::uint64_t tag) const {
    store_line(to + LineLane().byte_at(line), tagged_part(vector, line, tag), line < lines());
  }
};

/// The part of a row's channels that one of `warps` warps works on: every `warps`-th piece, step by step.
struct WarpShare {
  int warp;
  Divisor warps;

  DEEP_EP_DEVICE int steps(const CombineWire& wire) const { return (wire.pieces() - warp + warps - 1) / warps; }
  /// The lane's line of the first step, and how far on that of the next one is.
  DEEP_EP_DEVICE std::uint32_t first_line() const {
    return static_cast<std::uint32_t>(warp * kWarpLines + LineLane().line);
  }
  DEEP_EP_DEVICE std::uint32_t step() const { return static_cast<std::uint32_t>(warps * kWarpLines); }
};

DEEP_EP_DEVICE void add_weighted(float (&sum)[8], const Vec16& vector, float weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, bf16_low(vector.word[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, bf16_high(vector.word[i]), sum[2 * i + 1]);
  }
}

/// What ranks mean by the call: its shape, and the dispatch that the handle is of.
DEEP_EP_DEVICE std::uint32_t meaning_of(const LowLatencyCombineParams& params) {
  return params.call_shape ^ static_cast<std::uint32_t>(load_stream(params.table().epoch()));
}

/// A selection at the time of combine. At the head of a call owners announce to every rank, in cells, which experts
/// their tokens select now, and with which weights: they no longer know which ranks hold rows of their tokens. A cell
/// has all of meaning_of(): its lower half beside expert and weight in
/// the payload, its upper half above the epoch.
struct Selection {
  std::int64_t index;  ///< of the caller's table, which nothing has to wait for yet; or of a cell
  float weight;

  /// Of this rank's token.
  DEEP_EP_DEVICE static Selection load(const LowLatencyCombineParams& params, int token, int k) {
    const std::int64_t at = std::int64_t{token} * params.num_topk + k;
    return {params.topk_idx.load(at), load_stream(params.topk_weights + at)};
  }
  /// An expert that does not exist is none.
  DEEP_EP_DEVICE int expert(const LowLatencyCombineParams& params) const {
    return expert_of(index, params.num_experts());
  }
  DEEP_EP_DEVICE void announce(const LowLatencyCombineParams& params, Cell* cell, std::uint64_t epoch,
                               std::uint32_t meaning) const {
    const std::uint32_t low = meaning << 16 | (static_cast<std::uint32_t>(expert(params)) & 0xffffu);
    store_cell(cell, std::uint64_t{bits_of(weight)} << 32 | low, std::uint64_t{meaning >> 16} << kEpochBits | epoch);
  }

  static constexpr int kEpochBits = 48;  ///< as many as progress_value() has
  DEEP_EP_DEVICE static std::uint64_t epoch_in(const Cell& cell) {
    return cell.epoch & ((std::uint64_t{1} << kEpochBits) - 1);
  }
  DEEP_EP_DEVICE static std::uint32_t meaning_in(const Cell& cell) {
    return static_cast<std::uint32_t>(cell.epoch >> kEpochBits) << 16 | static_cast<std::uint32_t>(cell.payload) >> 16;
  }
};

/// One of the owner's selections as it has announced it. False: not yet; or there is no such token; or the owner means
/// another call than ours, of this `meaning`, which ends it.
template <class Call>
DEEP_EP_DEVICE bool load_announced(const Call& call, std::uint32_t meaning, int owner, const Cell* selection,
                                   Selection& announced) {
  const Cell cell = load_cell(selection);
  announced.index = static_cast<std::int64_t>(cell.payload & 0xffffu);
  announced.weight = float_from_bits(static_cast<std::uint32_t>(cell.payload >> 32));
  if (Selection::epoch_in(cell) < call.epoch) return false;
  const std::uint32_t theirs = Selection::meaning_in(cell);
  if (theirs != meaning) refuse_call(call.common, owner, 0, meaning, theirs);
  return theirs == meaning;
}
/// The rank of this node that selection `k` of a token names, once the owner has announced all; negative: none.
template <class Call>
DEEP_EP_DEVICE int announced_member(const LowLatencyCombineParams& params, const Call& call, std::uint32_t meaning,
                                    int owner, int token, int k) {
  Selection announced;
  const Cell* const selection = call.selections(owner) + token * params.num_topk + k;
  if (!load_announced(call, meaning, owner, selection, announced)) return -1;
  const int rank = params.rank_of(announced.expert(params));
  return rank >= 0 && call.in_own_node(rank) ? rank : -1;
}

/// By one warp: tells all ranks what this one means by the call, in place of its first selection. There is room.
template <class Call>
DEEP_EP_DEVICE void announce_meaning(const LowLatencyCombineParams& params, const Call& call, std::uint32_t meaning) {
  const Place<Cell> told = params.common.window.selections.at(call.epoch, params.common.rank);
  warp::each(params.common.num_ranks, [&](int peer) {
    Selection{-1, 0.0f}.announce(params, told.in(params.common.heaps[peer]), call.epoch, meaning);
  });
}
/// By one warp: waits until all ranks have, acquiring what they sent before. All mean the same call, or it is over.
template <class Call>
DEEP_EP_DEVICE void await_meanings(const Call& call, Wanted wanted, std::uint32_t meaning) {
  warp::each(call.common.num_ranks, [&](int peer) {
    wait_until(call.policy(), {peer, wanted, call.epoch}, [&](const Poll&) {
      Selection none;
      return load_announced(call, meaning, peer, call.selections(peer), none);
    });
    fence<Scope::system>();
  });
}

/// The call that the rank with the lane's number has acknowledged, for await_room(). The warp that reads the counters
/// does not look: its loads come after what it has acquired, and the block waits for what that warp loads next.
template <class Call>
DEEP_EP_DEVICE std::uint64_t load_room(const Call& no_call, bool reads_counters) {
  return reads_counters || lane_index() >= no_call.common.num_ranks ? 0 : no_call.load_acknowledged(lane_index());
}
/// By a whole warp: waits until ranks, so many from the `first` on, have room for rows that wait for no announcement of
/// theirs. False: the call is over.
template <class Call>
DEEP_EP_DEVICE bool await_room(const Call& call, int first, int count, std::uint64_t acknowledged) {
  bool there = true;
  warp::each(count, [&](int i) {
    const bool known = first + i == lane_index() && call.has_room(acknowledged);
    if (!known) there = call.await_room(first + i) && there;
  });
  return warp::agree(there);  // what follows in other lanes comes after the ranks' reads
}

struct CombineShared {
  struct Words {
    LowLatencyEpochs epochs;
    std::uint32_t meaning;  ///< see meaning_of()
    MaskWords masks;
  };

  Words* words;
  RdmaPeerParams* posters;  ///< in blocks that post, instead of the rest: of each warp
  std::uint32_t* pushed;    ///< of a send part that signals hold up: see UnreducedPusher
  std::size_t bytes;

  /// `poster_warps`: 0 where nothing is posted. `rows`: that signals may hold up.
  DEEP_EP_HOST_DEVICE CombineShared(Carver carver, int poster_warps, int rows = 0) {
    words = carver.take<Words>();
    posters = carver.take<RdmaPeerParams>(static_cast<std::size_t>(poster_warps), kLine);
    pushed = carver.take<std::uint32_t>(static_cast<std::size_t>(rows), kLine);
    bytes = carver.bytes();
  }
};

/// Which call is this? By all threads of the block: one warp reads the counters for all. They are loaded before
/// anything is stored, so that the block waits once.
DEEP_EP_DEVICE LowLatencyEpochs read_epochs(const LowLatencyCombineParams& params, CombineShared::Words& shared,
                                            bool reads) {
  if (reads && lane_index() == 0) {
    const std::uint32_t meaning = meaning_of(params);
    const LowLatencyEpochs epochs = params.common.counters(LowLatencyKind::combine).epochs();
    shared.meaning = meaning;
    shared.epochs = epochs;
    note_masks(params.common, shared.masks);
  }
  block::sync();
  return shared.epochs;
}

/// A row that the dispatch brought, as a warp of the expert side remembers it.
struct CombineRow {
  int source, index;
  std::int32_t rows;      ///< of the source; this one is there if `index` is below
  std::int32_t token;     ///< at the source
  std::int32_t position;  ///< in each lane that of a selection, negative: not on this rank
};

/// Groups of warps take the rows in turn. Neighbouring rows belong to different owners: all links are busy at once.
struct ReceivedRows {
  const LowLatencyCombineParams& params;
  int group, groups;      ///< in the block
  int sharing = 0;        ///< so many groups share a row: a power of two, by its exponent
  CombineRow first{};     ///< the group's first row
  std::int32_t most = 0;  ///< rows of any source that this lane has seen

  /// Starts the loads that do not depend on the call.
  DEEP_EP_DEVICE void load_first() {
    first = load_row(first_item() >> sharing);
    most = most_rows();
  }
  /// `push(row, member)` for the group's rows, until it returns false. The group is `member` of those that share the
  /// row.
  template <class Push>
  DEEP_EP_DEVICE void each(Push push) const {
    const int end = warp::max(most) * params.common.num_ranks << sharing;
    CombineRow next = first;
#pragma unroll 1
    for (int item = first_item(); item < end; item += step()) {
      const CombineRow row = next;
      next = load_row((item + step()) >> sharing);
      if (row.index >= row.rows) continue;
      if (!push(row, item & ((1 << sharing) - 1))) return;
    }
  }

  /// Groups of the grid.
  DEEP_EP_DEVICE int step() const { return groups * params.common.working_blocks; }

 private:
  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * params.common.working_blocks + block_index(); }

  /// The most rows that this lane's sources have.
  DEEP_EP_DEVICE std::int32_t most_rows() const {
    const int ranks = params.common.num_ranks;
    std::int32_t most =
        lane_index() < ranks ? load_stream(params.table().rows(lane_index())) : 0;  // nothing waits for it yet
#pragma unroll 1
    for (int source = lane_index() + kWarpSize; source < ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(params.table().rows(source));
      most = rows > most ? rows : most;
    }
    return most;
  }

  /// Loads what the table says of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const Divisor& ranks = params.common.num_ranks;
    CombineRow row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in a different order each time: otherwise a group could always meet the same one.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_stream(params.table().rows(row.source));
    row.token = load_stream(params.table().token(row.source, row.index));
    row.position = -1;
    if (lane_index() < params.num_topk) {
      row.position = load_stream(params.table().position(row.source, row.index, lane_index()));
    }
    return row;
  }
};

}  // namespace deep_ep::device::low_latency
