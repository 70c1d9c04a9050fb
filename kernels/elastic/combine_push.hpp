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
  std::int32_t origin = -1;  ///< token and source
  std::int32_t at = -1;      ///< in x: of the lane's selection, or, not expanded, the first lane's; -1: none

  /// By a whole warp. `row` -1: there is none.
  DEEP_EP_DEVICE static ReceivedRow load(const ElasticCombineParams& params, std::int32_t row) {
    ReceivedRow received;
    if (row < 0) return received;
    received.origin = load_weak(params.metadata.row(row));
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
};

/// By a lane: the weight of selection k that received row `row` has.
DEEP_EP_DEVICE float weight_of_selection(const ElasticCombineParams& params, std::int64_t row, int k) {
  std::int64_t at = row * params.num_topk + k;
  if (params.expanded) {
    at = load_weak(params.metadata.slots(row) + k);
    if (at < 0 || at >= params.num_rows) return 0;
  }
  return load_weak(params.weights + at);
}

/// Sums on their way to other ranks, by bulk stores from shared memory: many ordinary stores over NVLink at once hold up
/// the loads of their multiprocessor. A row's flag goes up while the sums of the next one are made.
struct SumsUnderWay {
  static constexpr std::uint32_t kStages = ElasticCombineShared::kStages;
  static constexpr std::uint32_t kStageBytes = ElasticCombineShared::kStageBytes;
  static constexpr int kTogether = kStageBytes / RowSum::kPieceBytes;
  static constexpr std::uint32_t kBehind = 2;  ///< stores under way behind a row whose flag goes up

  std::byte* memory;              ///< [kStages] of kStageBytes
  std::uint64_t signal;           ///< that flags are raised to
  std::byte* row = nullptr;       ///< at its owner
  std::uint64_t* flag = nullptr;  ///< of the row before, not up yet
  std::uint32_t stores = 0;       ///< begun
  std::uint32_t behind = 0;       ///< of these, behind that row

  DEEP_EP_DEVICE std::byte* stage() const { return memory + stores % kStages * kStageBytes; }

  DEEP_EP_DEVICE void begin() const {
    bulk::wait_read<kStages - 1>();
    warp::sync();
  }
  DEEP_EP_DEVICE void store(const RowSum& sum, int piece, std::uint32_t /*at*/, int vectors) const {
    sum.store_shared(stage() + static_cast<std::uint32_t>(piece) * RowSum::kPieceBytes, vectors);
  }
  DEEP_EP_DEVICE void finish(std::uint32_t at, std::uint32_t bytes) {
    bulk::publish(stage(), bytes);
    warp::sync();
    if (lane_index() == 0) {
      bulk::store(row + at, stage(), bytes);
      bulk::commit();
    }
    ++stores;
    if (flag != nullptr && ++behind == kBehind) raise<kBehind>();
  }
  template <std::uint32_t kLeft>
  DEEP_EP_DEVICE void raise() {
    if (flag != nullptr && lane_index() == 0) {
      bulk::wait<kLeft>();
      bulk::fence_global();
      store_release<Scope::system>(flag, signal);
    }
    flag = nullptr;
  }
  /// The row is on its way, and what travels beside it is stored.
  DEEP_EP_DEVICE void raise_later(std::uint64_t* flag_of_row) {
    raise<0>();
    flag = flag_of_row;
    behind = 0;
  }
};
struct NothingUnderWay {};

class ElasticPusher {
 public:
  /// Fetches what the first row takes, which needs no other rank.
  DEEP_EP_DEVICE ElasticPusher(const ElasticCombineParams& combine, const ElasticCombineShared& block,
                               std::uint64_t flags_go_to)
      : params(combine), shared(block), signal(flags_go_to) {
    share_out();
    ReceivedRow::load(params, row_of(turns.turn)).find(params, team.share(params));
  }

  /// Pushes rows until none is left.
  DEEP_EP_DEVICE void push_all() {
    if (params.staging_warps != 0 && team.members == 1) {
      SumsUnderWay under_way{sums_of_warp(), signal};
      push_rows(under_way);
      under_way.raise<0>();
    } else {
      NothingUnderWay nothing;
      push_rows(nothing);
    }
  }

 private:
  /// A warp loads the next row's metadata while it sums this row.
  template <class UnderWay>
  DEEP_EP_DEVICE void push_rows(UnderWay& under_way) {
    ReceivedRow row = ReceivedRow::load(params, row_of(turns.turn));
    while (turns.turn < end) {
      // Neither of these is needed before this row is done.
      const std::uint32_t drawn = turns.draw(work());
      const ReceivedRow next_row = ReceivedRow::load(params, row_of(turns.following));
      push(row, turns.turn, under_way);
      turns.advance(drawn);
      row = next_row;
    }
  }

  /// This warp's part in rows that several warps of the block push together, a power of two.
  struct Team {
    int members;

    DEEP_EP_DEVICE int number(const ElasticCombineParams& params) const {
      return (warp_index() - params.adding_warps) / members;
    }
    DEEP_EP_DEVICE int member(const ElasticCombineParams& params) const {
      return (warp_index() - params.adding_warps) & (members - 1);
    }
    DEEP_EP_DEVICE RowShare share(const ElasticCombineParams& params) const {
      return {static_cast<std::uint32_t>(member(params)) * RowSum::kPieceBytes,
              static_cast<std::uint32_t>(members) * RowSum::kPieceBytes};
    }
  };

  /// Sums a share of rows whose addresses the lanes of `holders` have, in the order of the lanes.
  template <class UnderWay>
  DEEP_EP_DEVICE void store_sum(std::uint64_t address, std::uint32_t holders, std::byte* to, const RowShare& share,
                                UnderWay& under_way) const {
    const auto find = [&](int k) {
      const bool holds = k < kWarpSize && (holders >> k & 1) != 0;
      return FoundRow{holds ? reinterpret_cast<const std::byte*>(address) : nullptr, nullptr};
    };
    const RowReduction reduction(kWarpSize, find);
    if constexpr (std::is_same_v<UnderWay, SumsUnderWay>) {
      under_way.row = to;
      reduction.add(under_way, params.row_bytes, RowShare{});
    } else {
      reduction.add(to, params.row_bytes, share);
    }
  }

  /// The part of a window in which this rank's sum of the row lies.
  DEEP_EP_DEVICE int part_of(std::int32_t number) const {
    if (params.parts_are_ranks()) return params.common.rank;
    return load_weak(params.metadata.row(number) + 1) % params.num_topk;
  }

  /// By a whole warp: its share of the row of turn `turn`, if that belongs to a token of this pass at another rank.
  template <class UnderWay>
  DEEP_EP_DEVICE void push(const ReceivedRow& row, std::uint32_t turn, UnderWay& under_way) const {
    const IntranodeParams& common = params.common;
    const std::int32_t owner = row.origin < 0 ? common.num_ranks : row.origin / params.max_tokens;
    if (owner >= common.num_ranks || owner == common.rank) return;
    const std::int32_t slot = row.origin - owner * params.max_tokens - params.first_token;
    if (slot < 0 || slot >= params.window.tokens) return;

    std::byte* heap = common.heaps[owner];
    const RowShare share = team.share(params);
    const std::uint64_t address = row.find(params, share);
    const std::uint32_t holders = warp::ballot(address != 0);
    std::uint32_t* beside = params.window.beside(heap, common.rank, slot);
    if (params.each_selection) {
      for (std::uint32_t left = holders; left != 0; left &= left - 1) {
        const int k = lowest_bit(left);
        store_sum(address, std::uint32_t{1} << k, params.window.row(heap, k, slot), share, under_way);
      }
      if (team.member(params) == 0 && lane_index() == 0) *beside = holders;
    } else {
      std::byte* const to = params.window.row(heap, part_of(row_of(turn)), slot);
      store_sum(address, holders, to, share, under_way);
      if (params.weighted && team.member(params) == 0 && lane_index() < params.num_topk) {
        reinterpret_cast<float*>(beside)[lane_index()] = weight_of_selection(params, row_of(turn), lane_index());
      }
    }
    warp::sync();
    std::uint64_t* const flag = common.flag_to(owner, slot);
    if constexpr (std::is_same_v<UnderWay, SumsUnderWay>) {
      under_way.raise_later(flag);
    } else if (lane_index() == 0 && all_have_stored()) {
      store_release<Scope::system>(flag, signal);
    }
  }

  /// By a lane of a warp that has stored its share: is that the last of the row?
  DEEP_EP_DEVICE bool all_have_stored() const {
    const auto members = static_cast<std::uint32_t>(team.members);
    return members == 1 || last_to_arrive<Scope::block>(shared.arrived + team.number(params), members);
  }

  /// How many warps share a row, so that `rows` rows occupy all pushing warps, and no warp takes a second row.
  DEEP_EP_DEVICE int members_for(std::uint32_t rows) const {
    const int warps = block_warps() - params.adding_warps;
    int members = 1;
    for (int more = 2; more <= warps; more *= 2) {
      const int teams = warps / more;
      if (teams > static_cast<int>(ElasticCombineShared::kMostShared)) continue;
      if (static_cast<std::uint32_t>(teams * params.pushing_blocks) >= rows) members = more;
    }
    return members;
  }

  DEEP_EP_DEVICE std::int32_t begin_of(int owner) const { return owner == 0 ? 0 : shared.source_ends[owner - 1]; }

  /// Of turn `turn`, -1: none. Owners take turns, so that each gets the rows of its first tokens first and can begin to
  /// add; each rank begins with another owner.
  DEEP_EP_DEVICE std::int32_t row_of(std::uint32_t turn) const {
    if (turn >= end) return -1;
    const int ranks = params.common.num_ranks;
    const auto others = static_cast<std::uint32_t>(ranks - 1);
    const int owner = (params.common.rank + 1 + static_cast<int>(turn % others)) % ranks;
    const std::int32_t number = begin_of(owner) + static_cast<std::int32_t>(turn / others);
    return number < shared.source_ends[owner] ? number : -1;
  }

  /// Few rows are shared out beforehand, each to a team of warps.
  DEEP_EP_DEVICE void share_out() {
    const int ranks = params.common.num_ranks;
    std::int32_t most = 0;  // rows of an owner
    for (int owner = lane_index(); owner < ranks; owner += kWarpSize) {
      const std::int32_t rows = owner == params.common.rank ? 0 : shared.source_ends[owner] - begin_of(owner);
      most = rows > most ? rows : most;
    }
    end = static_cast<std::uint32_t>(warp::max(most)) * static_cast<std::uint32_t>(ranks - 1);
    team = {members_for(end)};
    turns = {end, end};
    if (!params.pushes(block_index(), warp_index())) return;
    // Neighbours in order are in different blocks.
    turns = Turns::of_warp(work(), team.number(params) * params.pushing_blocks + block_index());
    if (team.members > 1) turns.following = end;
  }
  DEEP_EP_DEVICE std::byte* sums_of_warp() const {
    const int warp = warp_index() - params.adding_warps;
    return shared.sums + (warp < 0 ? 0 : warp) * std::ptrdiff_t{SumsUnderWay::kStages * SumsUnderWay::kStageBytes};
  }
  DEEP_EP_DEVICE SharedWork work() const {
    return {&params.common.state->elastic_next_row, end, params.pushers};
  }

  const ElasticCombineParams& params;
  const ElasticCombineShared& shared;
  std::uint64_t signal;  ///< that flags are raised to
  std::uint32_t end = 0;
  Team team{1};
  Turns turns{0, 0};
};

}  // namespace deep_ep::device
