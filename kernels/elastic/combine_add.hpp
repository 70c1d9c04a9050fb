// The adding warps of the second interface's combine. Each takes the next part of a token, waits for what the ranks of
// its selections push, and adds: biases, then the ranks' sums in the order of their last selections, or the rows of all
// selections in their order. This rank's own rows are read where they lie.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/elastic/combine_push.hpp"

namespace deep_ep::device {

/// A sum as it travels: rounded.
struct RoundedSum {
  Vec16 vectors[RowSum::kVectors];

  RoundedSum() = default;
  DEEP_EP_DEVICE explicit RoundedSum(const RowSum& of) {
    for (int v = 0; v < RowSum::kVectors; ++v) vectors[v] = pack_sum(of.sum[v]);
  }
  DEEP_EP_DEVICE void add_to(RowSum& sum) const { sum.add(vectors); }
};

/// The sum of a token of which this rank has several rows: it adds these up before the others, and rounds their sum. A
/// lane may have the address of one of these rows (`own`) and of another row (`term`); the sets say which lanes do.
struct OwnSum {
  static constexpr int kTogether = 7;  ///< rows under way at once, as many as there are registers for

  std::uint64_t own, term;  ///< of the lane; 0: none
  std::uint32_t own_rows;
  std::uint32_t before, behind;  ///< terms before the rank's sum and behind it
  const ElasticCombineParams& params;
  std::int64_t at;  ///< of the token's row in biases and result

  DEEP_EP_DEVICE void add_biases(RowSum& sum, std::uint32_t offset, int vectors) const {
    for (const std::byte* bias : params.bias) {
      if (bias != nullptr) sum.add_stream(bias + at + offset, vectors);
    }
  }

  /// The address of the row that is the lane's in this order: the rank's own, those before, those behind.
  DEEP_EP_DEVICE std::uint64_t in_order() const {
    std::uint64_t ordered = 0;
    int position = 0;
    const auto append = [&](std::uint32_t rows, std::uint64_t address) {
      for (; rows != 0; rows &= rows - 1, ++position) {
        const std::uint64_t row = warp::shuffle(address, lowest_bit(rows));
        if (lane_index() == position) ordered = row;
      }
    };
    append(own_rows, own);
    append(before, term);
    append(behind, term);
    return ordered;
  }

  /// Adds up a share of the rows.
  DEEP_EP_DEVICE void add(const RowShare& share) const {
    const std::uint32_t bytes = params.row_bytes;
    const int first = count_bits(own_rows), second = first + count_bits(before), rows = second + count_bits(behind);
    const std::uint64_t ordered = in_order();
#pragma unroll 1
    for (std::uint32_t offset = share.first; offset < bytes; offset += share.step) {
      const int vectors = RowSum::vectors_at(offset, bytes);
      RowSum sum;  // of the rank's rows, then of all terms
      RoundedSum rounded;
#pragma unroll 1
      for (int begin = 0; begin < rows; begin += kTogether) {
        Vec16 loaded[kTogether][RowSum::kVectors];
        RowSum::load(loaded, rows - begin, vectors, [&](int i) { return warp::shuffle(ordered, begin + i) + offset; });
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (begin + i >= first) break;
          sum.add(loaded[i]);
        }
        if (begin < first && begin + kTogether >= first) {  // all of the rank's rows are added
          rounded = RoundedSum(sum);
          sum = {};
          add_biases(sum, offset, vectors);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (begin + i < first || begin + i >= rows) continue;
          if (begin + i == second) rounded.add_to(sum);
          sum.add(loaded[i]);
        }
      }
      if (second == rows) rounded.add_to(sum);
      sum.store(params.combined_x + at + offset, vectors);
    }
  }
};

struct ElasticAdder {
  const ElasticCombineParams& params;
  std::uint64_t epoch;

  /// A selection of a token, in the lane with its index.
  struct Selection {
    std::int64_t index = -1;
    std::int32_t row_at_owner = -1;
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

  DEEP_EP_DEVICE Selection selection_at(std::int32_t number) const {
    const std::int64_t at = std::int64_t{number} * params.num_topk + lane_index();
    if (lane_index() >= params.num_topk) return {};
    return {params.topk_idx.load_cached(at), load_weak(params.rows_at_owners + at)};
  }
  DEEP_EP_DEVICE Token token_of(std::int32_t number, const Selection& selection) const {
    Token token{number, expert_of(selection.index, params.num_local_experts * params.common.num_ranks), false, {}};
    if (token.rank >= 0) token.rank /= params.num_local_experts;
    // A lane without a selection has a number of its own, which no rank has.
    const auto rank = static_cast<std::uint32_t>(token.rank >= 0 ? token.rank : -1 - lane_index());
    const std::uint32_t same = warp::match_any(rank);
    token.last = token.rank >= 0 && highest_bit(same) == lane_index();
    const std::uint32_t own = warp::ballot(is_own(token));
    if (own == 0) return token;
    const std::int32_t row = warp::shuffle(selection.row_at_owner, lowest_bit(own));
    if (row < 0 || row >= params.metadata.valid()) return token;
    const ReceivedRow received = ReceivedRow::load(params, row);
    // A row of another token does not count: rows_at_owners of another dispatch would name one.
    if (received.origin == params.common.rank * params.window.max_tokens + number) token.own = received;
    return token;
  }

  /// Waits until all that others push for the token is there. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token) const {
    bool good = true;
    if (token.last && !is_own(token)) {
      good = wait_signal(ReportLateHere{{params.wait}}, params.common.flag_from(token.rank, slot_of(token)),
                         {token.rank, Wanted::combine_rows, Progress::at(epoch, 1)});
    }
    return warp::agree(good);
  }

  /// The address of the row that is added for the lane's selection, 0 for none. `own`: that of the lane's own row.
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

  DEEP_EP_DEVICE RowShare share_of(int part) const {
    return {static_cast<std::uint32_t>(part) * RowSum::kPieceBytes,
            static_cast<std::uint32_t>(params.parts_per_token) * RowSum::kPieceBytes};
  }

  /// Adds a part of the token. `own`: the address of this rank's row of the lane's selection.
  DEEP_EP_DEVICE void add(const Token& token, std::uint64_t own, int part) const {
    const RowShare share = share_of(part);
    const std::int64_t at = std::int64_t{token.number} * params.row_bytes;
    // Its load is under way with those of the rows.
    const bool weighted = part == 0 && params.weighted && lane_index() < params.num_topk;
    const float weight = weighted ? weight_of(token) : 0;
    std::uint64_t term = term_of(token, own);
    const std::uint32_t own_rows = params.each_selection ? 0 : warp::ballot(own != 0);
    const std::uint32_t own_last = warp::ballot(token.last && is_own(token));
    if (count_bits(own_rows) > 1 && own_last != 0) {
      const std::uint32_t terms = warp::ballot(term != 0);
      const std::uint32_t before = (std::uint32_t{1} << lowest_bit(own_last)) - 1;
      OwnSum{own, term, own_rows, terms & before, terms & ~before, params, at}.add(share);
    } else {
      if (own_rows != 0) {  // one row is its own sum
        const std::uint64_t row = warp::shuffle(own, lowest_bit(own_rows));
        if (token.last && is_own(token)) term = row;
      }
      const auto find = [&](int k) {
        return FoundRow{k < kWarpSize ? reinterpret_cast<const std::byte*>(term) : nullptr, nullptr};
      };
      const auto bias_at = [&](int i) { return params.bias[i] == nullptr ? nullptr : params.bias[i] + at; };
      RowReduction(kWarpSize, find, bias_at(0), bias_at(1)).add(params.combined_x + at, params.row_bytes, share);
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

  DEEP_EP_DEVICE SharedWork work() const {
    const std::int32_t parts = params.window.tokens_of(params.num_tokens) * params.parts_per_token;
    return {&params.common.state->combine_next_part, static_cast<std::uint32_t>(parts), params.adders};
  }
  /// The parts that this warp adds. Blocks that only add have the first ones.
  DEEP_EP_DEVICE Turns share_out() const {
    if (params.pushes(block_index(), warp_index())) return Turns::of_late_warp(work());
    const int blocks = grid_blocks() - params.pushing_blocks, block = block_index() - params.pushing_blocks;
    return Turns::of_warp(work(), block >= 0
                                      ? warp_index() * blocks + block
                                      : blocks * block_warps() + warp_index() * params.pushing_blocks + block_index());
  }

  /// Adds parts of tokens until none is left, or a fault ends the call.
  DEEP_EP_DEVICE void add_all() const {
    const auto parts = static_cast<std::uint32_t>(params.parts_per_token);
    const std::uint32_t end = work().end;
    const auto selection_of = [&](std::uint32_t at) {
      return at < end ? selection_at(params.window.first_token + static_cast<std::int32_t>(at / parts)) : Selection{};
    };
    Turns turns = share_out();
    Selection selection = selection_of(turns.turn);
    while (turns.turn < end) {
      // Neither of these is needed before this part is done.
      const std::uint32_t drawn = turns.draw(work());
      const Selection next_selection = selection_of(turns.following);
      const Token token =
          token_of(params.window.first_token + static_cast<std::int32_t>(turns.turn / parts), selection);
      const auto part = static_cast<int>(turns.turn % parts);
      const std::uint64_t own = token.own.find(params, share_of(part));  // prefetched while the others' rows arrive
      if (!await(token)) return;
      add(token, own, part);
      turns.advance(drawn);
      selection = next_selection;
    }
  }
};

}  // namespace deep_ep::device
