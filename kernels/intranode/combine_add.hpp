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

  /// A token, and its row at the rank of the lane's index, looked up before: each look takes as long as loading a row.
  struct Token {
    int number;
    std::int32_t planned;
  };

  DEEP_EP_DEVICE std::int32_t row_at(const Token& token, int rank) const {
    return rows.row_held(rank < kWarpSize ? token.planned : rows.planned_row(token.number, rank), rank);
  }

  /// Waits until all rows of the token are there. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token) const {
    bool good = true;
    for (int rank = lane_index(); rank < rows.params.common.num_ranks; rank += kWarpSize) {
      good = (row_at(token, rank) < 0 || rows.await(token.number, rank)) && good;
    }
    return warp::agree(good);
  }

  /// Adds a part of the token.
  DEEP_EP_DEVICE void add(const Token& token, int part) const {
    const CombineParams& params = rows.params;
    const std::int64_t at = std::int64_t{token.number} * params.row_bytes;
    const auto bias = [&](int number) { return params.bias[number] == nullptr ? nullptr : params.bias[number] + at; };
    const auto find = [&](int rank) {
      const std::int32_t row = row_at(token, rank);
      return row < 0 ? FoundRow{} : rows.row(token.number, rank, row);
    };
    const RowReduction reduction(params.common.num_ranks, find, bias(0), bias(1));
    reduction.add(params.combined_x + at, params.row_bytes,
                  {static_cast<std::uint32_t>(part) * RowSum::kPieceBytes,
                   static_cast<std::uint32_t>(params.parts_per_token) * RowSum::kPieceBytes});
    if (part == 0 && params.combined_weights != nullptr) {
      reduction.add_weights(params.combined_weights + std::int64_t{token.number} * params.num_topk, params.num_topk);
    }
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
    return wait_signal(ReportLateHere{{params.wait}}, finished,
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

      const Token token{token_of(part), planned};
      if (params.window.round_of(token.number) != round) {
        if (!finish_round(round, added)) return false;
        round = params.window.round_of(token.number);
        added = 0;
      }
      if (!await(token)) return false;
      add(token, static_cast<int>(part % parts_of_token));
      ++added;
      part = following;
      planned = planned_next;
      following = warp::shuffle(ticket, 0);
    }
    return finish_round(round, added);
  }
};

}  // namespace deep_ep::device
