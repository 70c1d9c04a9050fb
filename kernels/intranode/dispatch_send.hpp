// The sending warps of dispatch: each takes a token, loads its row once into shared memory by a bulk copy, and stores
// it to each destination by one bulk copy, straight into its final place. The next row loads meanwhile.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/intranode/dispatch_shared.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// Row of `target` that a token's row `row` of its output is written to in this round; -1: not in this round.
DEEP_EP_DEVICE std::int64_t place_in_round(const DispatchTarget& target, std::int32_t row, std::uint32_t round) {
  if (row < 0 || row >= target.capacity) return -1;
  if (target.window_rows == 0) return round == 0 ? row : -1;
  const auto index = static_cast<std::uint32_t>(row - target.first_row);
  return index / target.window_rows == round ? std::int64_t{index % target.window_rows} : -1;
}

/// One warp's work on its tokens in one round.
struct DispatchSender {
  const DispatchParams& params;
  const DispatchShared& shared;
  std::uint32_t units;  ///< pieces loaded by this warp so far in this call: selects the stage and its parity

  /// A token's row travels in pieces of at most stage_bytes.
  struct Unit {
    int token;
    std::uint32_t offset;
    std::int64_t place;  ///< this lane's destination rank (the lane's index), -1: none
  };

  DEEP_EP_DEVICE std::int64_t place_at(int token, int rank, std::uint32_t round) const {
    const int num_ranks = params.common.num_ranks;
    if (rank >= num_ranks) return -1;
    return place_in_round(shared.targets[rank],
                          load_stream(params.destination_row + std::int64_t{token} * num_ranks + rank), round);
  }

  /// The warp's own token, if there is a warp for each; -1: warps take turns. Then nobody waits for a ticket.
  DEEP_EP_DEVICE static int own_token(const DispatchParams& params) {
    if (params.num_tokens > grid_blocks() * block_warps()) return -1;
    return warp_index() * grid_blocks() + block_index();
  }

  /// Takes tokens until one has something to send in this round. num_tokens: none is left. `first`: of the round.
  DEEP_EP_DEVICE Unit take(std::uint32_t round, bool first) const {
    const int own = own_token(params);
    for (;; first = false) {
      const auto taken = own < 0 ? take_next(&params.common.state->dispatch_next_token)
                                 : static_cast<std::uint32_t>(first ? own : params.num_tokens);
      if (taken >= static_cast<std::uint32_t>(params.num_tokens)) return Unit{params.num_tokens, 0, -1};
      const auto token = static_cast<int>(taken);
      const std::int64_t place = place_at(token, lane_index(), round);
      bool wanted = place >= 0;
      for (int rank = lane_index() + kWarpSize; rank < params.common.num_ranks; rank += kWarpSize) {
        wanted = wanted || place_at(token, rank, round) >= 0;
      }
      if (warp::any(wanted)) return Unit{token, 0, place};
    }
  }

  DEEP_EP_DEVICE Unit next(const Unit& unit, std::uint32_t round) const {
    if (unit.offset + params.stage_bytes < params.rows.row_bytes) {
      return Unit{unit.token, unit.offset + params.stage_bytes, unit.place};
    }
    return take(round, false);
  }

  DEEP_EP_DEVICE std::uint32_t bytes_of(const Unit& unit) const {
    const std::uint32_t left = params.rows.row_bytes - unit.offset;
    return left < params.stage_bytes ? left : params.stage_bytes;
  }

  DEEP_EP_DEVICE void load(const Unit& unit, std::uint32_t index) {
    const int stage = static_cast<int>(index % static_cast<std::uint32_t>(params.stages));
    // Every lane that stored from this stage must have seen its stores read it.
    bulk::wait_read_pending(params.stages - 2);
    warp::sync();
    if (lane_index() == 0) {
      Mbarrier& barrier = shared.barrier(warp_index(), stage);
      mbarrier::arrive_expect_bytes(barrier, bytes_of(unit));
      bulk::load(shared.stage(warp_index(), stage),
                 params.x + std::int64_t{unit.token} * params.rows.row_bytes + unit.offset, bytes_of(unit), barrier);
    }
  }

  DEEP_EP_DEVICE RowTargets::Row row_at(int rank, std::int64_t place) const {
    return shared.targets[rank].rows.row(params.rows, place);
  }

  DEEP_EP_DEVICE void store(const Unit& unit, std::uint32_t index, std::uint32_t round) {
    const auto stages = static_cast<std::uint32_t>(params.stages);
    const int stage = static_cast<int>(index % stages);
    mbarrier::wait(shared.barrier(warp_index(), stage), index / stages & 1);
    // A lane serves the destination of its own index, so that the stores are issued side by side.
    const std::byte* source = shared.stage(warp_index(), stage);
    std::int64_t place = unit.place;
    for (int rank = lane_index();;) {
      if (place >= 0) bulk::store(row_at(rank, place).x() + unit.offset, source, bytes_of(unit));
      rank += kWarpSize;
      if (rank >= params.common.num_ranks) break;
      place = place_at(unit.token, rank, round);
    }
    bulk::commit();
  }

  /// Scales, top-k and source index are small: lanes write them side by side into the peers' tensors.
  DEEP_EP_DEVICE void store_sidecar(const Unit& unit, std::uint32_t round) const {
    constexpr int kHeld = 4;  // scales a lane keeps in registers; more are read again for each destination
    const RowShape& shape = params.rows;
    const bool selects = params.topk_idx.data != nullptr && lane_index() < shape.num_topk;
    std::uint32_t held[kHeld];
    for (int i = 0; i < kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      held[i] = at < shape.num_scales ? load_stream(params.scales.at(unit.token, at)) : 0;
    }
    int expert = -1;
    float weight = 0;
    if (selects) {
      const std::int64_t at = std::int64_t{unit.token} * shape.num_topk + lane_index();
      expert = expert_of(params.topk_idx.load(at), params.num_local_experts * params.common.num_ranks);
      if (params.topk_weights != nullptr) weight = load_stream(params.topk_weights + at);
    }

    for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      const std::int64_t mine = first_rank == 0 ? unit.place : place_at(unit.token, first_rank + lane_index(), round);
      for (std::uint32_t left = warp::ballot(mine >= 0); left != 0; left &= left - 1) {
        const int lane = lowest_bit(left);
        const int rank = first_rank + lane;
        // A copy: the original is in shared memory, and for all the compiler knows each store here changes it.
        const RowTargets rows = shared.targets[rank].rows;
        const RowTargets::Row row = rows.row(params.rows, warp::shuffle(mine, lane));
        std::uint32_t* const scales = row.scales();
        for (int i = 0; i < kHeld; ++i) {
          const int at = lane_index() + i * kWarpSize;
          if (at < shape.num_scales) scales[at] = held[i];
        }
        for (int at = lane_index() + kHeld * kWarpSize; at < shape.num_scales; at += kWarpSize) {
          scales[at] = load_stream(params.scales.at(unit.token, at));
        }
        if (selects) {
          const int local = expert - rank * params.num_local_experts;
          const bool here = expert >= 0 && local >= 0 && local < params.num_local_experts;
          store_topk_index(row.topk_idx(), shape.topk_idx_is_64_bit, lane_index(), here ? local : -1);
          row.topk_weights()[lane_index()] = here ? weight : 0.0f;
        }
        if (params.send_src_idx && lane_index() == 0) *row.src_idx() = unit.token;
      }
    }
  }

  /// Sends what this warp has to send in this round. Afterwards every store of the warp is complete.
  DEEP_EP_DEVICE void send(std::uint32_t round) {
    const bool sidecar = params.rows.num_scales > 0 || params.topk_idx.data != nullptr || params.send_src_idx;
    Unit unit = take(round, true);
    if (unit.token < params.num_tokens) load(unit, units);
    while (unit.token < params.num_tokens) {
      const Unit following = next(unit, round);
      if (following.token < params.num_tokens) load(following, units + 1);
      if (sidecar && unit.offset == 0) store_sidecar(unit, round);
      store(unit, units, round);
      ++units;
      unit = following;
    }
    bulk::wait<0>();
    bulk::fence_global();
  }
};

}  // namespace deep_ep::device
