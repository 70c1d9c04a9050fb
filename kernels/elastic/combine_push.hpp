// The pushing warps of the second interface's combine. Each takes the next received row of another rank's token, adds
// up the rows that its selections have in x, and stores the sum straight into the owner's window: or, where the owner
// adds each selection's row by itself, these rows one after the other. Then it raises the token's flag.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/elastic/params.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// The metadata of a received row, in a warp's registers.
struct ReceivedRow {
  std::int32_t number = -1;
  std::int32_t origin = -1;         ///< token and source
  std::int32_t last_selection = 0;  ///< of this rank
  std::int32_t at = -1;             ///< in x: of the lane's selection, or, not expanded, the first lane's; -1: none

  /// By a whole warp. `row` -1: there is none.
  DEEP_EP_DEVICE static ReceivedRow load(const ElasticCombineParams& params, std::int32_t row) {
    ReceivedRow received;
    if (row < 0) return received;
    received.number = row;
    received.origin = load_weak(params.metadata.row(row));
    received.last_selection = load_weak(params.metadata.row(row) + 1);
    if (!params.expanded) {
      received.at = lane_index() == 0 ? row : -1;
    } else if (lane_index() < params.num_topk) {
      received.at = load_weak(params.metadata.slots(row) + lane_index());
    }
    return received;
  }
  /// The address of the lane's row, 0 for none; this share of it will be read soon. Only so much of it is fetched ahead
  /// as the cache holds for all warps of the device.
  DEEP_EP_DEVICE std::uint64_t find(const ElasticCombineParams& params, const RowShare& share) const {
    constexpr std::uint32_t kAhead = 4 * RowSum::kPieceBytes;
    if (at < 0 || at >= params.num_rows) return 0;
    const std::byte* row = params.x + std::int64_t{at} * params.row_bytes;
    const std::uint32_t rest = params.row_bytes - share.first;
    if (share.first < params.row_bytes) bulk::prefetch(row + share.first, rest < kAhead ? rest : kAhead);
    return reinterpret_cast<std::uint64_t>(row);
  }
  /// By a lane: the weight of its selection.
  DEEP_EP_DEVICE float weight(const ElasticCombineParams& params) const {
    const std::int64_t of_selection = params.expanded ? at : std::int64_t{number} * params.num_topk + lane_index();
    return params.expanded && (at < 0 || at >= params.num_rows) ? 0 : load_weak(params.weights + of_selection);
  }
};

struct ElasticPusher {
  const ElasticCombineParams& params;
  const ElasticCombineShared& shared;
  std::uint64_t epoch;
  int members = 1;  ///< warps of a team that pushes a row together, a power of two
  Turns turns{};

  DEEP_EP_DEVICE int number() const { return warp_index() - params.adding_warps; }
  DEEP_EP_DEVICE int team() const { return number() / members; }
  DEEP_EP_DEVICE int member() const { return number() & (members - 1); }
  DEEP_EP_DEVICE RowShare share() const { return {member(), members}; }
  DEEP_EP_DEVICE std::int32_t begin_of(int owner) const { return owner == 0 ? 0 : shared.source_ends[owner - 1]; }

  /// The row of turn `turn`; none behind the last one. Owners take turns, so that each gets the rows of its first
  /// tokens first and can begin to add; each rank begins with another owner.
  DEEP_EP_DEVICE ReceivedRow load(std::uint32_t turn) const {
    if (turn >= turns.end) return {};
    const int ranks = params.common.num_ranks;
    const auto piece = static_cast<int>(turn);
    const int behind = params.common.rank + 1 + piece % params.others, owner = behind < ranks ? behind : behind - ranks;
    const std::int32_t number = begin_of(owner) + piece / params.others;
    return ReceivedRow::load(params, number < shared.source_ends[owner] ? number : -1);
  }

  /// Shares rows out, and fetches what the first one takes. Neither needs another rank.
  DEEP_EP_DEVICE void prepare() {
    const int ranks = params.common.num_ranks, warps = block_warps() - params.adding_warps;
    std::int32_t most = 0;  // rows of an owner
    for (int owner = lane_index(); owner < ranks; owner += kWarpSize) {
      const std::int32_t rows = owner == params.common.rank ? 0 : shared.source_ends[owner] - begin_of(owner);
      most = rows > most ? rows : most;
    }
    const int end = warp::max(most) * (ranks - 1);
    // Few rows are shared out beforehand, each to a team: they occupy all pushing warps, and none takes a second row.
    while (2 * members <= warps && warps / (2 * members) * params.pushing_blocks >= end) members *= 2;
    // Neighbours in order are in different blocks.
    turns = Turns::of_warp(&params.common.state->elastic_rows_drawn, static_cast<std::uint32_t>(end),
                           params.pushing_blocks * warps, team() * params.pushing_blocks + block_index());
    if (number() < 0) turns.turn = turns.end;
    if (members > 1) turns.following = turns.end;
    load(turns.turn).find(params, share());
  }

  /// Pushes rows until none is left.
  DEEP_EP_DEVICE void push_all() {
    turns.each(
        load(turns.turn), [&](std::uint32_t turn) { return load(turn); },
        [&](const ReceivedRow& row, const ReceivedRow&) { return push(row), true; });
  }

  /// By a whole warp: its share of the row, if that belongs to a token of this pass at another rank.
  DEEP_EP_DEVICE void push(const ReceivedRow& row) const {
    const IntranodeParams& common = params.common;
    const std::int32_t owner = row.origin < 0 ? common.num_ranks : row.origin / params.window.max_tokens;
    if (owner >= common.num_ranks || owner == common.rank) return;
    const std::int32_t slot = params.window.slot_of(row.origin - owner * params.window.max_tokens);
    if (slot < 0 || slot >= params.window.tokens) return;

    std::byte* heap = common.heaps[owner];
    const std::uint64_t address = row.find(params, share());
    const bool each = params.each_selection;
    const std::uint32_t holders = warp::ballot(address != 0);
    // A part for each selection's row, or one for their sum. There is one place that adds: a call of few tokens takes
    // as long as it takes to fetch its code.
    std::uint32_t left = holders;
    do {
      if (each && left == 0) break;
      const int part = each ? lowest_bit(left) : params.part_of(common.rank, row.last_selection % params.num_topk);
      const std::uint32_t added = each ? left & (0u - left) : left;
      left ^= added;
      const auto find = [=](int k) {
        return FoundRow{(added >> k & 1) != 0 ? reinterpret_cast<const std::byte*>(address) : nullptr};
      };
      RowReduction(kWarpSize, find).add(params.window.row(heap, part, slot), params.row_bytes, share());
    } while (left != 0);
    // Beside the rows goes which ones there are, or their weights. These are loaded last: with their loads under way
    // while rows are added, a combine of 4096 tokens took 510 us instead of 417 on two H200.
    if (member() == 0 && (each ? lane_index() == 0 : params.weighted && lane_index() < params.num_topk)) {
      params.window.beside(heap, common.rank, slot)[lane_index()] = each ? holders : bits_of(row.weight(params));
    }
    warp::sync();
    if (lane_index() != 0) return;
    if (members > 1 && !last_to_arrive<Scope::block>(shared.arrived + team(), static_cast<std::uint32_t>(members))) {
      return;
    }
    store_release<Scope::system>(common.control.pushed_flag(heap, common.rank, slot), Progress::at(epoch, 1));
  }
};

}  // namespace deep_ep::device
