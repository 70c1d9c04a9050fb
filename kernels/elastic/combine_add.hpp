// The adding warps of the second interface's combine. Each takes the next part of a token, waits for what the ranks of
// its selections push, and adds: biases, then the ranks' sums in the order of their last selections, or the rows of all
// selections in their order. This rank's own rows are read where they lie.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/elastic/combine_push.hpp"

namespace deep_ep::device {

/// Adds a sum as it would travel: rounded.
DEEP_EP_DEVICE void add_rounded(RowSum& sum, const RowSum& term) {
  for (int v = 0; v < RowSum::kVectors; ++v) {
    Vec16 packed;
    for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(term.sum[v][2 * i], term.sum[v][2 * i + 1]);
    sum.add(v, packed);
  }
}

struct ElasticAdder {
  const ElasticCombineParams& params;
  std::uint64_t epoch;

  /// What is added for a token, as the lane of each selection knows it.
  struct Token {
    std::int32_t number;
    int rank;              ///< of the selection's expert; -1: none
    bool last;             ///< the rank has no later selection
    std::int32_t own_row;  ///< received row of the token on this rank; -1: none
  };

  DEEP_EP_DEVICE std::int32_t slot_of(const Token& token) const { return token.number - params.first_token; }
  DEEP_EP_DEVICE bool is_own(const Token& token) const { return token.rank == params.common.rank; }

  DEEP_EP_DEVICE Token token_at(std::int32_t number) const {
    const int lane = lane_index();
    const std::int64_t at = std::int64_t{number} * params.num_topk + lane;
    const std::int64_t index = lane < params.num_topk ? params.topk_idx.load_cached(at) : -1;
    Token token{number, expert_of(index, params.num_local_experts * params.common.num_ranks), false, -1};
    if (token.rank >= 0) token.rank /= params.num_local_experts;
    // Lanes without a selection are alone with their number, which no rank has.
    const auto rank = static_cast<std::uint32_t>(token.rank >= 0 ? token.rank : -1 - lane);
    const std::uint32_t same = warp::match_any(rank);
    token.last = token.rank >= 0 && highest_bit(same) == lane;
    const std::uint32_t own = warp::ballot(is_own(token));
    if (own == 0) return token;
    const std::int32_t row = is_own(token) ? load_weak(params.rows_at_owners + at) : -1;
    token.own_row = warp::shuffle(row, lowest_bit(own));
    // A row of another token, which a table of another dispatch would name, is none.
    const std::int32_t id = params.common.rank * params.max_tokens + number;
    if (token.own_row < 0 || token.own_row >= params.metadata.valid() ||
        load_weak(params.metadata.row(token.own_row)) != id) {
      token.own_row = -1;
    }
    return token;
  }

  /// Waits until all that others push for the token is there. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token) const {
    bool good = true;
    if (token.last && !is_own(token)) {
      good = wait_signal(params.wait, params.common.flag_from(token.rank, slot_of(token)),
                         {token.rank, Wanted::combine_rows, round_signal(epoch, 1)});
    }
    return warp::agree(good);
  }

  /// The address of what is added for the lane's selection, 0 for nothing. `own`: that of the lane's own row.
  DEEP_EP_DEVICE std::uint64_t term_of(const Token& token, std::uint64_t own) const {
    std::byte* heap = params.common.own_heap();
    if (params.each_selection) {
      if (is_own(token)) return own;
      if (token.rank < 0) return 0;
      const std::uint32_t sent = load_weak(params.window.beside(heap, token.rank, slot_of(token)));
      if ((sent >> lane_index() & 1) == 0) return 0;
      return reinterpret_cast<std::uint64_t>(params.window.row(heap, lane_index(), slot_of(token)));
    }
    if (!token.last || is_own(token)) return 0;
    const int part = params.part_of(token.rank, lane_index());
    return reinterpret_cast<std::uint64_t>(params.window.row(heap, part, slot_of(token)));
  }

  /// Adds a part of the token. This rank's rows, whose addresses the lanes of `own_rows` have in `own`, are a term of
  /// their own, rounded, behind the terms of lanes below `own_last`.
  DEEP_EP_DEVICE void add_with_own_sum(std::uint64_t term, std::uint64_t own, std::uint32_t own_rows, int own_last,
                                       const std::byte* const (&bias)[2], std::byte* to, const RowShare& share) const {
    const std::uint32_t terms = warp::ballot(term != 0);
    const std::uint32_t before = (std::uint32_t{1} << own_last) - 1;
#pragma unroll 1
    for (std::uint32_t offset = share.first; offset < params.row_bytes; offset += share.step) {
      const int vectors = RowSum::vectors_at(offset, params.row_bytes);
      RowSum of_rank, sum;
      of_rank.add_rows(own, own_rows, offset, vectors);
      for (const std::byte* each : bias) {
        if (each != nullptr) sum.add_stream(each + offset, vectors);
      }
      sum.add_rows(term, terms & before, offset, vectors);
      add_rounded(sum, of_rank);
      sum.add_rows(term, terms & ~before, offset, vectors);
      sum.store(to + offset, vectors);
    }
  }

  DEEP_EP_DEVICE void add(const Token& token, int part) const {
    const std::int64_t at = std::int64_t{token.number} * params.row_bytes;
    const auto bias_at = [&](int i) { return params.bias[i] == nullptr ? nullptr : params.bias[i] + at; };
    const std::byte* const bias[2] = {bias_at(0), bias_at(1)};
    const RowShare share{static_cast<std::uint32_t>(part) * RowSum::kPieceBytes,
                         static_cast<std::uint32_t>(params.parts_per_token) * RowSum::kPieceBytes};
    const std::uint64_t own = token.own_row < 0 ? 0 : row_of_selection(params, token.own_row);
    std::uint64_t term = term_of(token, own);
    const std::uint32_t own_rows = params.each_selection ? 0 : warp::ballot(own != 0);
    const std::uint32_t own_last = warp::ballot(token.last && is_own(token));
    if (count_bits(own_rows) > 1 && own_last != 0) {
      add_with_own_sum(term, own, own_rows, lowest_bit(own_last), bias, params.combined_x + at, share);
    } else {
      if (own_rows != 0) {  // one row is its own sum
        const std::uint64_t row = warp::shuffle(own, lowest_bit(own_rows));
        if (token.last && is_own(token)) term = row;
      }
      const auto find = [&](int k) {
        return FoundRow{k < kWarpSize ? reinterpret_cast<const std::byte*>(term) : nullptr, nullptr};
      };
      RowReduction(kWarpSize, find, bias[0], bias[1]).add(params.combined_x + at, params.row_bytes, share);
    }
    if (part == 0 && params.weighted) add_weights(token);
  }

  /// A selection's weight is what its expert's rank holds for it.
  DEEP_EP_DEVICE void add_weights(const Token& token) const {
    const int lane = lane_index();
    if (lane >= params.num_topk) return;
    float weight = 0;
    if (is_own(token)) {
      if (token.own_row >= 0) weight = weight_of_selection(params, token.own_row, lane);
    } else if (token.rank >= 0) {
      const std::uint32_t* beside = params.window.beside(params.common.own_heap(), token.rank, slot_of(token));
      weight = load_weak(reinterpret_cast<const float*>(beside) + lane);
    }
    params.combined_weights[std::int64_t{token.number} * params.num_topk + lane] = weight;
  }

  /// Adds parts of tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool add_all() const {
    std::uint32_t* next = &params.common.state->combine_next_part;
    const auto parts = static_cast<std::uint32_t>(params.parts_per_token);
    const std::uint32_t end = static_cast<std::uint32_t>(params.tokens_in_pass()) * parts;
    for (std::uint32_t at = take_next(next); at < end; at = take_next(next)) {
      const Token token = token_at(params.first_token + static_cast<std::int32_t>(at / parts));
      if (!await(token)) return false;
      add(token, static_cast<int>(at % parts));
    }
    return true;
  }
};

}  // namespace deep_ep::device
