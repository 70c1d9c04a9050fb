// The adding warps of combine. Each takes the next part of a token, and adds, in rank order and in fp32, its pieces of
// the rows that the token's destination ranks hold. Warps take parts as they go: tokens have more or fewer rows, and
// SMs differ in speed. It fetches what it needs for the next part while it works on the current one.
//
// Where a row comes from makes no difference to the sum: a peer that has its rows in the heap is read over NVLink, one
// that pushes is read from our window once the row's flag is up.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/intranode/combine_rows.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

struct CombineAdder {
  CombineRows rows;
  bool gives_credit;  ///< peers push more than our window holds, so they wait for finished rounds

  /// Adds the weights that the token's destination ranks hold, slot by slot, in rank order.
  DEEP_EP_DEVICE void add_weights(int token) const {
    const CombineParams& params = rows.params;
    float sum = 0;
    for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      const int rank = first_rank + lane_index();
      const std::int32_t row = rows.row_held(rows.planned_row(token, rank), rank);
      const std::uint64_t at = row < 0 ? 0 : reinterpret_cast<std::uint64_t>(rows.weights(token, rank, row));
      sum = device::add_weights(sum, at, warp::ballot(row >= 0), params.num_topk);
    }
    if (lane_index() < params.num_topk) {
      params.combined_weights[std::int64_t{token} * params.num_topk + lane_index()] = sum;
    }
  }

  /// The ranks from `first_rank` on, one per lane, whose row of the token the lane knows: which have one (a bit each),
  /// and where. `good` becomes false after a fault.
  DEEP_EP_DEVICE std::uint32_t find_rows(int token, int first_rank, std::int32_t planned, std::uint64_t& address,
                                         bool& good) const {
    const int rank = first_rank + lane_index();
    const std::int32_t row = rows.row_held(planned, rank);
    good = warp::agree(row < 0 || rows.await(token, rank)) && good;
    address = row < 0 ? 0 : reinterpret_cast<std::uint64_t>(rows.address(token, rank, row));
    return warp::ballot(row >= 0);
  }

  /// Adds a part of the token, whose row at the rank of the lane's index is `planned`. False after a fault.
  DEEP_EP_DEVICE bool add_part(int token, int part, std::int32_t planned) const {
    const CombineParams& params = rows.params;
    bool good = true;
    std::uint64_t address = 0;
    const std::uint32_t holders = find_rows(token, 0, planned, address, good);
    if (!good) return false;
    const auto step = static_cast<std::uint32_t>(params.parts_per_token) * RowSum::kPieceBytes;
    for (std::uint32_t offset = static_cast<std::uint32_t>(part) * RowSum::kPieceBytes; offset < params.row_bytes;
         offset += step) {
      const std::uint32_t rest = params.row_bytes - offset;
      const int vectors = static_cast<int>((rest < RowSum::kPieceBytes ? rest : RowSum::kPieceBytes) / sizeof(Vec16));
      const std::int64_t at = std::int64_t{token} * params.row_bytes + offset;
      RowSum sum;
      for (const std::byte* bias : params.bias) {
        if (bias != nullptr) sum.add_stream(bias + at, vectors);
      }
      sum.add_rows(address, holders, offset, vectors);
      for (int first_rank = kWarpSize; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
        std::uint64_t later_address = 0;
        const std::uint32_t later =
            find_rows(token, first_rank, rows.planned_row(token, first_rank + lane_index()), later_address, good);
        if (!good) return false;
        sum.add_rows(later_address, later, offset, vectors);
      }
      sum.store(params.combined_x + at, vectors);
    }
    if (part == 0 && params.combined_weights != nullptr) add_weights(token);
    return true;
  }

  /// Parts of tokens in a round.
  DEEP_EP_DEVICE std::uint32_t parts_in(std::uint64_t round) const {
    const CombineParams& params = rows.params;
    const std::int64_t of_round = params.window.tokens_per_round;
    const std::int64_t rest = params.num_tokens - static_cast<std::int64_t>(round) * of_round;
    return static_cast<std::uint32_t>((rest < of_round ? rest : of_round) * params.parts_per_token);
  }

  DEEP_EP_DEVICE bool await_round(const std::uint64_t* finished, std::uint64_t round) const {
    const CombineParams& params = rows.params;
    return wait_signal(params.wait, finished,
                       {params.common.rank, Wanted::combine_credit, round_signal(rows.epoch, round)});
  }

  /// This warp has read its last part of the round, the `parts`th. The last one to say so gives the pushing peers
  /// credit. False after a fault.
  DEEP_EP_DEVICE bool finish_round(std::uint64_t round, std::uint32_t parts) const {
    if (!gives_credit || parts == 0) return true;
    const IntranodeParams& common = rows.params.common;
    warp::sync();
    bool good = true;
    if (lane_index() == 0) {
      // Tickets take turns in a few words; do not take one that an unfinished earlier round still uses.
      const std::uint64_t* finished = common.signal_from(common.rank, IntranodeSignal::combine_credit);
      good = round < kWindowRounds || await_round(finished, round - kWindowRounds + 1);
      if (good && last_to_arrive<Scope::gpu>(&common.state->combine_round_ticket[round % kWindowRounds],
                                             parts_in(round), parts)) {
        // A round may be finished before the one before it, whose slots it must not give away: credit goes in order.
        good = round == 0 || await_round(finished, round);
        for (int peer = 0; good && peer < common.num_ranks; ++peer) {
          store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::combine_credit),
                                       round_signal(rows.epoch, round + 1));
        }
      }
    }
    return warp::all(good);
  }

  /// Adds parts of tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool add_all() const {
    const CombineParams& params = rows.params;
    std::uint32_t* next = &params.common.state->combine_next_part;
    const auto parts_of_token = static_cast<std::uint32_t>(params.parts_per_token);
    const std::uint32_t end = static_cast<std::uint32_t>(params.num_tokens) * parts_of_token;
    const auto token_of = [&](std::uint32_t part) { return static_cast<int>(part / parts_of_token); };
    const auto planned_row = [&](std::uint32_t part) {
      return part < end ? rows.planned_row(token_of(part), lane_index()) : -1;
    };
    std::uint64_t round = 0;
    std::uint32_t added = 0;  // parts of this round
    std::uint32_t part = take_next(next);
    std::uint32_t following = take_next(next);
    std::int32_t planned = planned_row(part);
    while (part < end) {
      // Nobody looks at these two before this part is done.
      const std::uint32_t ticket = lane_index() == 0 ? fetch_add_relaxed<Scope::gpu>(next, std::uint32_t{1}) : 0;
      const std::int32_t planned_next = planned_row(following);

      const int token = token_of(part);
      if (params.window.round_of(token) != round) {
        if (!finish_round(round, added)) return false;
        round = params.window.round_of(token);
        added = 0;
      }
      if (!add_part(token, static_cast<int>(part % parts_of_token), planned)) return false;
      ++added;
      part = following;
      planned = planned_next;
      following = warp::shuffle(ticket, 0);
    }
    return finish_round(round, added);
  }
};

}  // namespace deep_ep::device
