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
  const DispatchTarget* targets;
  const DispatchShared& layout;
  std::byte* memory;
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
    return place_in_round(targets[rank], load_stream(params.destination_row + std::int64_t{token} * num_ranks + rank),
                          round);
  }

  /// Takes tokens until one has something to send in this round. num_tokens: none is left.
  DEEP_EP_DEVICE Unit take(std::uint32_t round) const {
    for (;;) {
      const std::uint32_t taken = take_next(&params.common.state->dispatch_next_token);
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
    if (unit.offset + params.stage_bytes < params.row_bytes) {
      return Unit{unit.token, unit.offset + params.stage_bytes, unit.place};
    }
    return take(round);
  }

  DEEP_EP_DEVICE std::uint32_t bytes_of(const Unit& unit) const {
    const std::uint32_t left = params.row_bytes - unit.offset;
    return left < params.stage_bytes ? left : params.stage_bytes;
  }

  DEEP_EP_DEVICE void load(const Unit& unit, std::uint32_t index) {
    const int stage = static_cast<int>(index % static_cast<std::uint32_t>(params.stages));
    // Every lane that stored from this stage must have seen its stores read it.
    bulk::wait_read_pending(params.stages - 2);
    warp::sync();
    if (lane_index() == 0) {
      Mbarrier& barrier = layout.barriers(memory, warp_index())[stage];
      mbarrier::arrive_expect_bytes(barrier, bytes_of(unit));
      bulk::load(layout.stage(memory, warp_index(), stage),
                 params.x + std::int64_t{unit.token} * params.row_bytes + unit.offset, bytes_of(unit), barrier);
    }
  }

  DEEP_EP_DEVICE void store(const Unit& unit, std::uint32_t index, std::uint32_t round) {
    const auto stages = static_cast<std::uint32_t>(params.stages);
    const int stage = static_cast<int>(index % stages);
    mbarrier::wait(layout.barriers(memory, warp_index())[stage], index / stages & 1);
    // A lane serves the destination of its own index, so that the stores are issued side by side.
    const std::byte* source = layout.stage(memory, warp_index(), stage);
    std::int64_t place = unit.place;
    for (int rank = lane_index();;) {
      if (place >= 0)
        bulk::store(targets[rank].rows.x + place * params.row_bytes + unit.offset, source, bytes_of(unit));
      rank += kWarpSize;
      if (rank >= params.common.num_ranks) break;
      place = place_at(unit.token, rank, round);
    }
    bulk::commit();
  }

  /// Scales, top-k and source index are small: lanes write them side by side into the peers' tensors.
  DEEP_EP_DEVICE void store_sidecar(const Unit& unit, std::uint32_t round) const {
    constexpr int kHeld = 4;  // scales a lane keeps in registers; more are read again for each destination
    const std::uint32_t* scales = params.scales + std::int64_t{unit.token} * params.scale_token_stride;
    std::uint32_t held[kHeld];
    std::int64_t expert = -1;
    float weight = 0;
    for (int i = 0; i < kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      held[i] = at < params.num_scales ? load_stream(scales + at * params.scale_stride) : 0;
    }
    if (params.topk_idx != nullptr && lane_index() < params.num_topk) {
      const std::int64_t at = std::int64_t{unit.token} * params.num_topk + lane_index();
      expert = params.topk_idx_is_64_bit ? load_stream(static_cast<const std::int64_t*>(params.topk_idx) + at)
                                         : load_stream(static_cast<const std::int32_t*>(params.topk_idx) + at);
      weight = load_stream(params.topk_weights + at);
    }

    for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      const std::int64_t mine = first_rank == 0 ? unit.place : place_at(unit.token, first_rank + lane_index(), round);
      for (std::uint32_t left = warp::ballot(mine >= 0); left != 0; left &= left - 1) {
        const int lane = lowest_bit(left);
        const int rank = first_rank + lane;
        const std::int64_t place = warp::shuffle(mine, lane);
        const RowTargets& rows = targets[rank].rows;
        auto* scale_row = reinterpret_cast<std::uint32_t*>(rows.scales) + place * params.num_scales;
        for (int i = 0; i < kHeld; ++i) {
          const int at = lane_index() + i * kWarpSize;
          if (at < params.num_scales) scale_row[at] = held[i];
        }
        for (int at = lane_index() + kHeld * kWarpSize; at < params.num_scales; at += kWarpSize) {
          scale_row[at] = load_stream(scales + at * params.scale_stride);
        }
        if (params.topk_idx != nullptr && lane_index() < params.num_topk) {
          const std::int64_t local = expert - std::int64_t{rank} * params.num_local_experts;
          const bool here = expert >= 0 && local >= 0 && local < params.num_local_experts;
          const std::int64_t at = place * params.num_topk + lane_index();
          if (params.topk_idx_is_64_bit) {
            reinterpret_cast<std::int64_t*>(rows.topk_idx)[at] = here ? local : -1;
          } else {
            reinterpret_cast<std::int32_t*>(rows.topk_idx)[at] = here ? static_cast<std::int32_t>(local) : -1;
          }
          rows.topk_weights[at] = here ? weight : 0.0f;
        }
        if (params.send_src_idx && lane_index() == 0) rows.src_idx[place] = unit.token;
      }
    }
  }

  /// Sends what this warp has to send in this round. Afterwards every store of the warp is complete.
  DEEP_EP_DEVICE void send(std::uint32_t round) {
    const bool sidecar = params.num_scales > 0 || params.topk_idx != nullptr || params.send_src_idx;
    Unit unit = take(round);
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
