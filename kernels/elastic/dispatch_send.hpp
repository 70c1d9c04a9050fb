// The sending warps of the second interface's dispatch. Each takes a token, loads its row once into shared memory by a
// bulk copy, and stores it by bulk copies to the token's place at each other rank that has one of its experts. The next
// row loads meanwhile. Scales and weights go to their places at this rank, too.
#pragma once

#include "kernels/common/row_pipe.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/elastic/dispatch_params.hpp"

namespace deep_ep::device {

struct ElasticSender {
  const ElasticDispatchParams& params;
  RowPipe pipe;

  DEEP_EP_DEVICE bool sends() const {
    const int block = block_index() - params.first_sender;
    return block >= 0 && block < params.sending_blocks && warp_index() < params.sending_warps;
  }

  struct Unit {
    std::int32_t token = 0;
    int owner = -1;        ///< the rank of the expert that is the lane's selection, -1: none
    bool travels = false;  ///< to another rank
  };

  Turns turns{};  ///< tokens of the pass, counted from its first one
  Unit ahead{};   ///< what is sent first

  /// By a whole warp: does the row go to the rank of this lane?
  DEEP_EP_DEVICE bool goes_to(const Unit& unit, int rank) const {
    bool found = false;
#pragma unroll 4
    for (int k = 0; k < params.rows.num_topk; ++k) found |= warp::shuffle(unit.owner, k) == rank;
    return found;
  }

  /// The token whose turn it is; behind the last one a row that does not travel.
  DEEP_EP_DEVICE Unit unit_of(std::uint32_t turn) const {
    Unit unit;
    if (turn >= turns.end) return unit;
    unit.token = params.window.first_token + static_cast<std::int32_t>(turn);
    if (lane_index() < params.rows.num_topk) {
      const std::int64_t index =
          params.topk_idx.load_cached(std::int64_t{unit.token} * params.rows.num_topk + lane_index());
      const int expert = expert_of(index, params.num_local_experts * params.common.num_ranks);
      unit.owner = expert < 0 ? -1 : expert / params.num_local_experts;
    }
    unit.travels = warp::any(unit.owner >= 0 && unit.owner != params.common.rank);
    return unit;
  }

  /// Of a token whose row travels; else nullptr.
  DEEP_EP_DEVICE const std::byte* row_of(const Unit& unit) const {
    return unit.travels ? params.x + std::int64_t{unit.token} * params.rows.row_bytes : nullptr;
  }
  /// Sends the row, which is loading, and loads the next one. A lane serves the rank of its own number, so that the
  /// stores are issued side by side.
  DEEP_EP_DEVICE void send(const Unit& unit, const Unit& next) {
    const IntranodeParams& common = params.common;
    const auto to_each = [&](auto store) {
#pragma unroll 1
      for (int first = 0; first < common.num_ranks; first += kWarpSize) {
        const int rank = first + lane_index();
        if (!goes_to(unit, rank) || rank == common.rank) continue;
        store(
            params.window.row(common.heaps[rank], landing_part(common.rank, rank), params.window.slot_of(unit.token)));
      }
    };
    const std::byte *const row = row_of(unit), *const following = row_of(next);
    pipe.move([=] { return row; }, [=] { return following; }, params.rows.row_bytes, [] { return true; }, to_each);
  }

  /// Word `at` of those that travel beside a token's row.
  DEEP_EP_DEVICE std::uint32_t word_beside(std::int32_t token, int at) const {
    const int num_scales = params.rows.num_scales;
    if (at < num_scales) return load_stream(params.scales.at(token, at));
    const float* weights = params.topk_weights + std::int64_t{token} * params.rows.num_topk;
    return load_stream(reinterpret_cast<const std::uint32_t*>(weights) + (at - num_scales));
  }
  /// Scales and weights are small: lanes write them side by side into the windows.
  DEEP_EP_DEVICE void store_beside(const Unit& unit) const {
    constexpr int kHeld = 4;  // words a lane keeps in registers; more are read again for each destination
    const IntranodeParams& common = params.common;
    const auto words = static_cast<int>(params.window.words_beside);
    if (words == 0) return;
    std::uint32_t held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = lane_index() + i * kWarpSize;
      held[i] = at < words ? word_beside(unit.token, at) : 0;
    }
#pragma unroll 1
    for (int first = 0; first < common.num_ranks; first += kWarpSize) {
#pragma unroll 1
      for (std::uint32_t left = warp::ballot(goes_to(unit, first + lane_index())); left != 0; left &= left - 1) {
        const int rank = first + lowest_bit(left);
        std::uint32_t* const to =
            params.window.beside(common.heaps[rank], common.rank, params.window.slot_of(unit.token));
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int at = lane_index() + i * kWarpSize;
          if (at < words) to[at] = held[i];
        }
#pragma unroll 1
        for (int at = lane_index() + kHeld * kWarpSize; at < words; at += kWarpSize) {
          to[at] = word_beside(unit.token, at);
        }
      }
    }
  }

  /// Before ranks meet: the warp's first token comes to shared memory.
  DEEP_EP_DEVICE void prepare() {
    if (!sends()) return;
    if (lane_index() == 0) pipe.init();
    const auto tokens = static_cast<std::uint32_t>(params.window.tokens_of(params.num_tokens));
    turns = Turns::of_warp(&params.common.state->next_piece, tokens, params.sending_blocks * params.sending_warps,
                           warp_index() * params.sending_blocks + block_index() - params.first_sender);
    ahead = unit_of(turns.turn);
    if (ahead.travels) pipe.begin(row_of(ahead), params.rows.row_bytes);
  }
  /// Sends what this warp has to send. Afterwards every store of the warp is complete.
  DEEP_EP_DEVICE void send() {
    if (!sends()) return;
#pragma unroll 1
    for (Unit unit = ahead; !turns.over();) {
      const std::uint32_t drawn = turns.draw();  // needed when this row is on its way
      const Unit next = unit_of(turns.following);
      send(unit, next);
      store_beside(unit);
      turns.advance(drawn);
      unit = next;
    }
    pipe.drop();
    bulk::fence_global();
  }
};

}  // namespace deep_ep::device
