// The adding warps of the second interface's combine. Each takes the next part of a token, waits for what the ranks of
// its selections push, and adds: biases, then the ranks' sums in the order of their last selections, or the rows of all
// selections in their order. This rank's own rows are read where they lie; several of a token are added into this
// rank's own place in its window first.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/elastic/combine_push.hpp"

namespace deep_ep::device {

struct ElasticAdder {
  const ElasticCombineParams& params;
  std::uint64_t epoch;

  /// The adder loads this of a token while it still adds the one before.
  struct Selections {
    std::int64_t index;  ///< that the lane selects
    std::int32_t own_row;
  };
  /// A token, as the lane of each selection knows it.
  struct Token {
    std::int32_t number;
    int rank;         ///< of the selection's expert; -1: none
    bool last;        ///< the rank has no later selection
    ReceivedRow own;  ///< on this rank, of the token
  };

  DEEP_EP_DEVICE std::int32_t slot_of(const Token& token) const { return params.window.slot_of(token.number); }
  DEEP_EP_DEVICE bool is_own(const Token& token) const { return token.rank == params.common.rank; }

  DEEP_EP_DEVICE Token token_of(std::int32_t number, const Selections& selections) const {
    Token token{number, expert_of(selections.index, params.num_local_experts * params.common.num_ranks), false, {}};
    if (token.rank >= 0) token.rank = token.rank / params.num_local_experts;
    // A lane without a selection has a number of its own, which no rank has.
    const auto rank = static_cast<std::uint32_t>(token.rank >= 0 ? token.rank : -1 - lane_index());
    const std::uint32_t same = warp::match_any(rank);
    token.last = token.rank >= 0 && highest_bit(same) == lane_index();
    const std::int32_t row = selections.own_row;
    if (!warp::any(is_own(token)) || row < 0 || row >= params.metadata.valid()) return token;
    const ReceivedRow received = ReceivedRow::load(params, row);
    // A row of another token does not count: own_rows of another dispatch would name one.
    if (received.origin == params.common.rank * params.window.max_tokens + number) token.own = received;
    return token;
  }

  /// Waits until all that others push for the token is there. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token) const {
    bool good = true;
    if (token.last && !is_own(token)) {
      const IntranodeParams& common = params.common;
      good = wait_signal(common.wait, common.control.pushed_flag(common.own_heap(), token.rank, slot_of(token)),
                         {token.rank, Wanted::combine_rows, Progress::at(epoch, 1)});
    }
    return warp::agree(good);
  }

  /// The address of the row that is added for the lane's selection, 0 for none. `own`: that of the lane's own row;
  /// `own_rows`: lanes that have one, if they are added up first.
  DEEP_EP_DEVICE std::uint64_t term_of(const Token& token, std::uint64_t own, std::uint32_t own_rows) const {
    std::byte* heap = params.common.own_heap();
    if (params.each_selection) {
      if (is_own(token)) return own;
      if (token.rank < 0) return 0;
      const std::uint32_t sent = load_weak(params.window.beside(heap, token.rank, slot_of(token)));
      if ((sent >> lane_index() & 1) == 0) return 0;
      return reinterpret_cast<std::uint64_t>(params.window.row(heap, lane_index(), slot_of(token)));
    }
    // By all lanes.
    const std::uint64_t only = warp::shuffle(own, own_rows == 0 ? 0 : lowest_bit(own_rows));
    if (!token.last) return 0;
    if (is_own(token) && count_bits(own_rows) <= 1) return only;
    const int part = params.part_of(token.rank, lane_index());
    return reinterpret_cast<std::uint64_t>(params.window.row(heap, part, slot_of(token)));
  }

  /// Adds a part of the token. `own`: the address of this rank's row of the lane's selection.
  DEEP_EP_DEVICE void add(const Token& token, std::uint64_t own, int part) const {
    const RowShare share(part, params.parts_per_token);
    const std::int64_t at = std::int64_t{token.number} * params.row_bytes;
    // Its load is under way with those of the rows.
    const bool weighted = part == 0 && params.weighted && lane_index() < params.num_topk;
    const float weight = weighted ? weight_of(token) : 0;
    const std::uint32_t own_rows = params.each_selection ? 0 : warp::ballot(own != 0);
    const std::uint64_t term = term_of(token, own, own_rows);
    const std::uint32_t own_last = warp::ballot(token.last && is_own(token));
    const std::uint64_t own_sum = warp::shuffle(term, own_last == 0 ? 0 : lowest_bit(own_last));
    // Several rows of this rank are added up first. Their rounded sum lies where another rank would have pushed it, and
    // each lane reads of it what it has written. One place in the code adds, as in ElasticPusher.
#pragma unroll 1
    for (int step = count_bits(own_rows) > 1 ? 0 : 1; step < 2; ++step) {
      const auto find = [&](int) { return FoundRow{reinterpret_cast<const std::byte*>(step == 0 ? own : term)}; };
      const auto bias_at = [&](int i) {
        return step == 0 || params.bias[i] == nullptr ? nullptr : params.bias[i] + at;
      };
      std::byte* const to = step == 0 ? reinterpret_cast<std::byte*>(own_sum) : params.combined_x + at;
      RowReduction(kWarpSize, find, bias_at(0), bias_at(1)).add(to, params.row_bytes, share);
    }
    if (weighted) params.combined_weights[std::int64_t{token.number} * params.num_topk + lane_index()] = weight;
  }

  /// By a lane: the weight of its selection, which the rank of its expert holds.
  DEEP_EP_DEVICE float weight_of(const Token& token) const {
    if (is_own(token)) return token.own.number >= 0 ? token.own.weight(params) : 0;
    if (token.rank < 0) return 0;
    const std::uint32_t* beside = params.window.beside(params.common.own_heap(), token.rank, slot_of(token));
    return load_weak(reinterpret_cast<const float*>(beside) + lane_index());
  }

  /// Adds parts of tokens until none is left, or a fault ends the call.
  DEEP_EP_DEVICE void add_all() const {
    const Divisor& parts = params.parts_per_token;
    const auto end = static_cast<std::uint32_t>(params.window.tokens_of(params.num_tokens) * parts);
    std::uint32_t* const drawn = &params.common.state->pieces_drawn;
    // Blocks that only add have the first parts, then those warps of the others that do not push.
    const int pushing = params.pushing_blocks, others = grid_blocks() - pushing, first = others * block_warps();
    const int warps = first + pushing * params.adding_warps;
    const int number = block_index() < pushing ? first + warp_index() * pushing + block_index()
                                               : warp_index() * others + block_index() - pushing;
    Turns turns = number < warps ? Turns::of_warp(drawn, end, warps, number) : Turns::of_late_warp(drawn, end, warps);
    const auto token_at = [&](std::uint32_t at) { return params.window.first_token + static_cast<int>(at) / parts; };
    const auto look = [&](std::uint32_t at) {
      if (at >= turns.end) return Selections{};
      const std::int64_t first = std::int64_t{token_at(at)} * params.num_topk;
      return Selections{lane_index() < params.num_topk ? params.topk_idx.load_cached(first + lane_index()) : -1,
                        load_weak(params.own_rows + first)};
    };
    turns.each(look(turns.turn), look, [&](const Selections& selections, const Selections&) {
      const Token token = token_of(token_at(turns.turn), selections);
      const int part = static_cast<int>(turns.turn) % parts;
      const std::uint64_t own = token.own.find(params, {part, parts});  // prefetched while the others' rows arrive
      if (!await(token)) return false;
      add(token, own, part);
      return true;
    });
  }
};

}  // namespace deep_ep::device
