// Parts that both sides of the low-latency combine share: rows as they travel, what the owner of tokens selects, shared
// memory of a block, how it learns which call it is in, and the rows that the dispatch brought.
#pragma once

#include <cmath>

#include "kernels/common/row_sum.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device::low_latency {

/// Kind of a combine row; part of its tags. A receiver ignores rows of another kind.
enum class CombineRowKind : std::uint32_t {
  sum_bf16 = 1,  ///< the sum of several weighted rows, in bfloat16
  sum_fp24,      ///< in fp32 without the lowest 8 bits
  sum_fp32,
  row,           ///< what an expert made of the token, without its weight
  selected_row,  ///< the same in a call in two launches, which sends each selection's row (unreduced.hpp)
};

// Channels of a sum, of which a lane has eight at once, in the order of the vector's halfwords.

/// Adds a row of one rank times its weight, by fused multiply-adds.
DEEP_EP_DEVICE void fuse_row(float (&sum)[8], const Vec16& row, float weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, bf16_low(row.word[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, bf16_high(row.word[i]), sum[2 * i + 1]);
  }
}

/// Adds half of the last bit that travels, before the lower bits are cut off: to nearest, ties away from zero. A NaN
/// stays as it is: the addition could make a zero of it.
DEEP_EP_DEVICE void add_half(float (&sum)[8], int rest_bits) {
  const std::uint32_t half = (1u << (16 - rest_bits)) >> 1;
#pragma unroll
  for (float& channel : sum) {
    const bool is_nan = channel != channel;
    channel = is_nan ? channel : float_from_bits(bits_of(channel) + half);
  }
}
/// Rounds to the bits that travel.
DEEP_EP_DEVICE void round_sum(float (&sum)[8], int rest_bits) {
  add_half(sum, rest_bits);
#pragma unroll
  for (float& channel : sum) channel = float_from_bits(bits_of(channel) & ~0u << (16 - rest_bits));
}

/// The upper halves.
DEEP_EP_DEVICE Vec16 upper_halves(const float (&sum)[8]) {
  Vec16 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.word[i] = permute_bytes(bits_of(sum[2 * i]), bits_of(sum[2 * i + 1]), 0x7632);
  return packed;
}
/// The lower halves: the rest of 16 bits.
DEEP_EP_DEVICE Vec16 lower_halves(const float (&sum)[8]) {
  Vec16 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.word[i] = permute_bytes(bits_of(sum[2 * i]), bits_of(sum[2 * i + 1]), 0x5410);
  return packed;
}
/// The rest of 8 bits, the upper bytes of the lower halves, of the channels of two words: those of the first word where
/// they are in its lower halves, those of the second one byte below.
DEEP_EP_DEVICE std::uint32_t upper_bytes(const Vec16& lower_halves, int first_word) {
  return permute_bytes(lower_halves.word[first_word], lower_halves.word[first_word + 1], 0x3715);
}
/// The lower halves of which a line has the rest; `half`: see CombineRowFormat::rest_half.
DEEP_EP_DEVICE Vec16 lower_halves_of(const Vec16& rest, int rest_bits, int half) {
  if (rest_bits == 16) return rest;
  const std::uint32_t low = half == 0 ? rest.word[0] : rest.word[1], high = half == 0 ? rest.word[2] : rest.word[3];
  constexpr std::uint32_t kBytes = 0xff00ff00u;
  return {low & kBytes, low << 8 & kBytes, high & kBytes, high << 8 & kBytes};
}

/// Adds the rows of a token in the order that all transports keep: `part` is the sum of what is added up before it
/// meets other parts (the rows of a rank, or of a node), from zero on.
struct CombineSum {
  float total[8] = {}, part[8] = {};

  /// A row times its weight, each product rounded before it is added: the bits do not depend on who adds. For a
  /// sum, lower_halves has its rest, and weight must be 1.
  DEEP_EP_DEVICE void add_row(const Vec16& row, const Vec16& lower_halves, float weight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t low = permute_bytes(lower_halves.word[i], row.word[i], 0x5410);
      const std::uint32_t high = permute_bytes(lower_halves.word[i], row.word[i], 0x7632);
      part[2 * i] += rounded_product(weight, float_from_bits(low));
      part[2 * i + 1] += rounded_product(weight, float_from_bits(high));
    }
  }
  /// Ends a part; `several`: of several rows, so it is rounded as if it had travelled.
  DEEP_EP_DEVICE void end_part(bool several, int rest_bits) {
    if (several) round_sum(part, rest_bits);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      total[i] += part[i];
      part[i] = 0.0f;
    }
  }
};

/// A selection at the time of combine.
struct Selection {
  TopkIndices::Words index = {};  ///< of the caller's table, which nothing has to wait for yet; or of a cell
  float weight = 0.0f;
  bool known = true;  ///< see CombineCall::load_announced()

  DEEP_EP_DEVICE static Selection load(const LowLatencyCombineParams& params, int token, int k) {
    const int at = token * params.num_topk + k;  // at most kMostLowLatencyTokens
    return {params.topk_idx.load_words(at), load_stream(params.topk_weights + at)};
  }
  /// An expert that does not exist is none.
  DEEP_EP_DEVICE int expert(const LowLatencyCombineParams& params) const {
    return expert_of(params.topk_idx.index_of(index), params.num_experts());
  }
};

/// At the head of a combine owners announce to every rank, in cells, which experts their tokens select now, and with
/// which weights: they no longer know which ranks hold rows of their tokens.
template <bool kRdma>
struct CombineCall : RankCall<LowLatencyKind::combine, kRdma> {
  using Base = RankCall<LowLatencyKind::combine, kRdma>;
  using Base::common, Base::epoch, Base::node, Base::row;
  const LowLatencyCombineParams& params;
  const std::uint32_t& meaning;  ///< see CallWords

  /// Announces a selection of this rank. Its cell also has the meaning, and the expert above the epoch.
  DEEP_EP_DEVICE void announce(const Selection& selection, Cell* cell) const {
    store_cell(cell, std::uint64_t{bits_of(selection.weight)} << 32 | meaning,
               static_cast<std::uint64_t>(selection.expert(params)) << kEpochBits | epoch);
  }
  /// One of the owner's selections as it has announced it. It is not known yet; or there is no such token; or the owner
  /// means another call than ours, which ends it. Of a far owner once has_begun() says so.
  DEEP_EP_DEVICE Selection load_announced(int owner, int selection = 0) const {
    const Cell cell = load_cell(common.window.selections.at(epoch, owner).in(common.local) + selection);
    const auto theirs = static_cast<std::uint32_t>(cell.payload);
    const bool came = (cell.epoch & ((std::uint64_t{1} << kEpochBits) - 1)) >= epoch;
    if (came && theirs != meaning) refuse(owner, 0, meaning, theirs);
    return {{static_cast<std::uint32_t>(cell.epoch >> kEpochBits), 0},
            float_from_bits(static_cast<std::uint32_t>(cell.payload >> 32)),
            came && theirs == meaning};
  }
  /// Ends the call: `peer` means another one; or selects what was not dispatched (`field` 1), or this rank does (2).
  /// The control thread tells the others.
  DEEP_EP_DEVICE void refuse(int peer, int field, std::uint64_t ours, std::uint64_t theirs) const {
    report_fault(common.wait, FaultKind::mismatch, Wanted::low_latency_combine_selection, peer, field, ours, theirs);
  }
  /// By a whole warp: waits until a far owner has announced its selections, acquiring them.
  DEEP_EP_DEVICE bool await_announced(int far_owner) const {
    return this->template await_progress<WholeWarp>(far_owner, 0, Wanted::low_latency_combine_selection);
  }
  /// The rank of this node that selection `k` of a token names, once the owner has announced all; negative: none.
  DEEP_EP_DEVICE int announced_member(int owner, int token, int k) const {
    const Selection announced = load_announced(owner, token * params.num_topk + k);
    const int rank = announced.known ? params.rank_of(announced.expert(params)) : -1;
    return rank >= 0 && this->in_own_node(rank) ? rank : -1;
  }

  /// By one warp: tells all ranks what this one means by the call, in place of its first selection. All have
  /// acknowledged the call before the last (await_room()), so their cells are free.
  DEEP_EP_DEVICE void announce_meaning() const {
    const Place<Cell> told = common.window.selections.at(epoch, common.rank);
    warp::each(common.num_ranks, [&](int peer) { announce({}, told.in(common.heaps[peer])); });
  }
  /// By one warp: waits until all ranks have. All mean the same call, or it is over. It acquires what they sent before,
  /// also rows that no warp polls: this rank acknowledges all of them.
  DEEP_EP_DEVICE void await_meanings() const {
    warp::each(common.num_ranks, [&](int peer) {
      wait_until(*this, {peer, Wanted::low_latency_combine_rows, epoch},
                 [&](const Poll&) { return load_announced(peer).known; });
      fence<Scope::system>();
    });
  }

  /// By rails, in the relay's heap: the row of `member` of its node for a token of far `owner`. A relay does not put
  /// its own into the window: that place is for the rows that the owner has for it.
  DEEP_EP_DEVICE Place<std::byte> row_of_member(int owner, int member, int token) const {
    if (member % common.rail_width == owner % common.rail_width) return this->relayed_row(node(owner), token);
    return row(this->rail(node(owner), member), token);
  }

  // Tags of lines. A line's last word is never anything else.

  /// The upper part of a row's tag: its kind, and of the kinds that are one expert's row the expert.
  DEEP_EP_DEVICE static std::uint32_t mark(CombineRowKind kind, int expert = 0) {
    return static_cast<std::uint32_t>(expert) << 3 | static_cast<std::uint32_t>(kind);
  }
  DEEP_EP_DEVICE std::uint32_t sum_mark() const {
    return mark(static_cast<CombineRowKind>(1 + params.format.rest_bits / 8));
  }
  /// The tag contains the lowest 20 bits of the mark.
  DEEP_EP_DEVICE std::uint64_t tag(std::uint32_t mark) const { return std::uint64_t{mark} << kMarkShift | epoch; }
  DEEP_EP_DEVICE static std::uint32_t expert_of(std::uint32_t mark) { return (mark & kMarks) >> 3; }
  DEEP_EP_DEVICE static bool is_sum(std::uint64_t tag) {
    return (tag >> kMarkShift & 7) < static_cast<std::uint32_t>(CombineRowKind::row);
  }
  /// The line of the heap where the rows of a source begin.
  DEEP_EP_DEVICE std::uint32_t part_line(int source) const {
    return common.window.rows[Base::kIndex].line_at(epoch, source);
  }
  /// Row of the dispatch's selection `k` of `token`, in the heap of the token's owner: see unreduced.hpp.
  DEEP_EP_DEVICE Place<std::byte> selected_row(int token, int k) const { return row(0, token * params.num_topk + k); }

 private:
  static constexpr int kEpochBits = 48;  ///< of a cell; more than Progress has
  static constexpr int kMarkShift = 44;  ///< of a tag, likewise
  static constexpr std::uint32_t kMarks = (1u << 20) - 1;
};

struct CombineShared : CallShared {
  int held_up;  ///< rows that signals may hold up
  /// Of rows that signals hold up, group by group: a bit for each selection that has left.
  std::uint32_t* pushed = carver.take<std::uint32_t>(held_up, kLine);
  std::size_t bytes = carver.bytes();

  /// By a whole warp: waits until ranks, so many from the `first` on, have room for rows that wait for no announcement
  /// of theirs. False: the call is over.
  template <class Call>
  DEEP_EP_DEVICE bool await_room(const Call& call, int first, int count) const {
    bool there = true;
    warp::each(count, [&](int i) { there = call.await_room(first + i, acknowledged[first + i]) && there; });
    return warp::agree(there);  // what follows in other lanes comes after the ranks' reads
  }
};

/// A row that the dispatch brought, as a warp of the expert side remembers it.
struct CombineRow {
  int source, index;
  std::int32_t rows;      ///< of the source; this one is there if `index` is below
  std::int32_t token;     ///< at the source
  std::int32_t position;  ///< in each lane that of a selection, negative: not on this rank
};

/// The expert side. Groups of warps take the rows in turn, and the warps of a group share a row by its lines.
/// Neighbouring rows belong to different owners: all links are busy at once.
struct RowPusher {
  const LowLatencyCombineParams& params;
  const CombineShared& shared;
  int group, groups;      ///< in the block
  int warp;               ///< in the group
  int sharing = 0;        ///< so many groups share a row: a power of two, by its exponent
  CombineRow first{};     ///< the group's first row
  std::int32_t most = 0;  ///< rows of any source that this lane has seen

  DEEP_EP_DEVICE const CombineRowFormat& format() const { return params.format; }

  /// Starts the loads that do not depend on the call. `shares`: more groups than rows share the selections of a row.
  DEEP_EP_DEVICE void load_first(bool shares) {
    while (shares && params.expert_rows << (sharing + 1) <= step() && 1 << sharing < params.num_topk) ++sharing;
    first = load_row(first_item() >> sharing);
    const int ranks = params.common.num_ranks;
    most = lane_index() < ranks ? load_weak(params.table().rows(lane_index())) : 0;  // nothing waits for it yet
#pragma unroll 1
    for (int source = lane_index() + kWarpSize; source < ranks; source += kWarpSize) {
      const std::int32_t rows = load_weak(params.table().rows(source));
      most = rows > most ? rows : most;
    }
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

  // Of a row this warp works on every warps_per_row-th of equal shares, step by step. A share is so many groups of
  // lines as the lane has lines of it, four apart.
  DEEP_EP_DEVICE int line_steps(int groups_of_share) const {
    const int shares = (format().line_groups + groups_of_share - 1) / groups_of_share;
    return (shares - warp + params.warps_per_row - 1) / params.warps_per_row;
  }
  /// The lane's first line of the first step, and how far on that of the next one is.
  DEEP_EP_DEVICE std::uint32_t first_line(int groups_of_share) const {
    return static_cast<std::uint32_t>(warp * groups_of_share * kWarpLines + LineLane().line);
  }
  DEEP_EP_DEVICE std::uint32_t line_step(int groups_of_share) const {
    return static_cast<std::uint32_t>(params.warps_per_row * groups_of_share * kWarpLines);
  }

 private:
  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * params.common.working_blocks + block_index(); }

  /// Loads what the table says of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const Divisor& ranks = params.common.num_ranks;
    CombineRow row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in a different order each time: otherwise a group could always meet the same one.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_weak(params.table().rows(row.source));
    row.token = load_weak(params.table().token(row.source, row.index));
    row.position = -1;
    if (lane_index() < params.num_topk) {
      row.position = load_weak(params.table().position(row.source, row.index, lane_index()));
    }
    return row;
  }
};

}  // namespace deep_ep::device::low_latency
