// The pushing warps of the second interface's combine. Each takes the next received row of another rank's token, adds
// up the rows that its selections have in x, and stores the sum straight into the owner's window: or, where the owner
// adds each selection's row by itself, these rows one after the other. Then it raises the token's flag.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/elastic/params.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// The rows of x that belong to received row `row`, by a whole warp: the address of the lane's selection's, 0 for none.
DEEP_EP_DEVICE std::uint64_t row_of_selection(const ElasticCombineParams& params, std::int64_t row) {
  const int lane = lane_index();
  std::int64_t at = -1;
  if (!params.expanded) {
    at = lane == 0 ? row : -1;
  } else if (lane < params.num_topk) {
    at = load_weak(params.metadata.slots(row) + lane);
  }
  if (at < 0 || at >= params.num_rows) return 0;
  return reinterpret_cast<std::uint64_t>(params.x) + static_cast<std::uint64_t>(at) * params.row_bytes;
}

/// By a lane: what received row `row` holds as the weight of selection k.
DEEP_EP_DEVICE float weight_of_selection(const ElasticCombineParams& params, std::int64_t row, int k) {
  std::int64_t at = row * params.num_topk + k;
  if (params.expanded) {
    at = load_weak(params.metadata.slots(row) + k);
    if (at < 0 || at >= params.num_rows) return 0;
  }
  return load_weak(params.weights + at);
}

struct ElasticPusher {
  const ElasticCombineParams& params;
  std::uint64_t epoch;

  /// Sums rows whose addresses the lanes of `holders` have, in the order of the lanes.
  DEEP_EP_DEVICE void store_sum(std::uint64_t address, std::uint32_t holders, std::byte* to) const {
    const auto find = [&](int k) {
      const bool holds = k < kWarpSize && (holders >> k & 1) != 0;
      return FoundRow{holds ? reinterpret_cast<const std::byte*>(address) : nullptr, nullptr};
    };
    RowReduction(kWarpSize, find).add(to, params.row_bytes, {});
  }

  /// By a whole warp: row `row`, if it belongs to a token of this pass at another rank.
  DEEP_EP_DEVICE void push(std::int64_t row) const {
    const IntranodeParams& common = params.common;
    const std::int32_t origin = load_weak(params.metadata.row(row));
    const std::int32_t owner = origin < 0 ? common.num_ranks : origin / params.max_tokens;
    if (owner >= common.num_ranks || owner == common.rank) return;
    const std::int32_t slot = origin - owner * params.max_tokens - params.first_token;
    if (slot < 0 || slot >= params.window.tokens) return;

    std::byte* heap = common.heaps[owner];
    const std::uint64_t address = row_of_selection(params, row);
    const std::uint32_t holders = warp::ballot(address != 0);
    std::uint32_t* beside = params.window.beside(heap, common.rank, slot);
    if (params.each_selection) {
      for (std::uint32_t left = holders; left != 0; left &= left - 1) {
        const int k = lowest_bit(left);
        store_sum(address, std::uint32_t{1} << k, params.window.row(heap, k, slot));
      }
      if (lane_index() == 0) *beside = holders;
    } else {
      const int last = params.num_topk == 0 ? 0 : load_weak(params.metadata.row(row) + 1) % params.num_topk;
      store_sum(address, holders, params.window.row(heap, params.part_of(common.rank, last), slot));
      if (params.weighted && lane_index() < params.num_topk) {
        reinterpret_cast<float*>(beside)[lane_index()] = weight_of_selection(params, row, lane_index());
      }
    }
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(common.flag_to(owner, slot), round_signal(epoch, 1));
  }

  /// Pushes rows until none is left. Owners in turn, so that each gets the rows of its first tokens first and can begin
  /// to add; each rank begins with another one.
  DEEP_EP_DEVICE void push_all() const {
    const int ranks = params.common.num_ranks;
    const std::int64_t valid = params.metadata.valid();
    const auto end_of = [&](int owner) -> std::int64_t {
      return owner < 0 ? 0 : load_weak(params.source_ends + owner);
    };
    std::int64_t most = 0;  // rows of an owner
    for (int owner = lane_index(); owner < ranks; owner += kWarpSize) {
      const std::int64_t rows = owner == params.common.rank ? 0 : end_of(owner) - end_of(owner - 1);
      most = rows > most ? rows : most;
    }
    most = warp::max(most);
    const int others = ranks - 1;
    std::uint32_t* next = &params.common.state->elastic_next_row;
    for (std::int64_t at = take_next(next); at < most * others; at = take_next(next)) {
      const int owner = (params.common.rank + 1 + static_cast<int>(at % others)) % ranks;
      const std::int64_t row = end_of(owner - 1) + at / others;
      if (row < end_of(owner) && row < valid) push(row);
    }
  }
};

}  // namespace deep_ep::device
