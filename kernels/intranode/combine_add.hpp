// The adding warps of combine: together they take each piece from the ring, a slice each, and add it in fp32 to what
// its token has so far. Rows come in rank order, wherever they come from, so the sum does not depend on that.
#pragma once

#include "kernels/intranode/combine_rows.hpp"
#include "kernels/intranode/tickets.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

struct CombineAdder {
  static constexpr int kVectors = CombineShared::kVectors;

  CombineRows rows;
  const CombineShared& layout;
  std::byte* memory;
  int warp;  ///< among the adding warps of the block

  /// This lane's v-th vector of a piece.
  DEEP_EP_DEVICE int vector_at(int v) const { return (v * layout.adding_warps + warp) * kWarpSize + lane_index(); }

  DEEP_EP_DEVICE static void add(float (&sum)[8], const Vec16& vector) {
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += bf16_low(vector.word[i]);
      sum[2 * i + 1] += bf16_high(vector.word[i]);
    }
  }

  /// Begins a piece with bias_0 + bias_1, or zero.
  DEEP_EP_DEVICE void begin(float (&sum)[kVectors][8], const FetchedPiece& piece, std::int64_t at) const {
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < 8; ++i) sum[v][i] = 0;
      const int vector = vector_at(v);
      for (const std::byte* bias : rows.params.bias) {
        if (bias == nullptr || vector * sizeof(Vec16) >= piece.bytes) continue;
        add(sum[v], load_stream(reinterpret_cast<const Vec16*>(bias + at) + vector));
      }
    }
  }

  DEEP_EP_DEVICE void store(const float (&sum)[kVectors][8], const FetchedPiece& piece, std::int64_t at) const {
    for (int v = 0; v < kVectors; ++v) {
      const int vector = vector_at(v);
      if (vector * sizeof(Vec16) >= piece.bytes) continue;
      Vec16 packed;
      for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[v][2 * i], sum[v][2 * i + 1]);
      store_stream(reinterpret_cast<Vec16*>(rows.params.combined_x + at) + vector, packed);
    }
  }

  /// Adds the weights that the token's destination ranks hold, slot by slot, in rank order.
  DEEP_EP_DEVICE void add_weights(int token) const {
    const CombineParams& params = rows.params;
    float sum = 0;
    for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      const int rank = first_rank + lane_index();
      const std::int32_t row = rows.row_at(token, rank);
      const std::uint64_t at = row < 0 ? 0 : reinterpret_cast<std::uint64_t>(rows.weights(token, rank, row));
      constexpr int kTogether = 8;  // loads under way at once: a peer's memory is far away
      for (std::uint32_t left = warp::ballot(row >= 0); left != 0;) {
        float values[kTogether];
        for (int i = 0; i < kTogether; ++i) {
          values[i] = 0;
          if (left == 0) continue;
          const std::uint64_t from = warp::shuffle(at, lowest_bit(left));
          left &= left - 1;
          if (lane_index() < params.num_topk) values[i] = load_weak(reinterpret_cast<const float*>(from) + lane_index());
        }
        for (int i = 0; i < kTogether; ++i) sum += values[i];
      }
    }
    if (lane_index() < params.num_topk) {
      params.combined_weights[std::int64_t{token} * params.num_topk + lane_index()] = sum;
    }
  }

  /// The token's rows have been read. Whoever says so for a round's last token gives the pushing peers credit.
  DEEP_EP_DEVICE bool finish(int token) const {
    const CombineParams& params = rows.params;
    if (params.num_tokens <= params.window_tokens) return true;  // the window holds everything: nobody needs credit
    const IntranodeParams& common = params.common;
    const std::uint64_t round = rows.round_of(token);
    const std::int64_t rest = params.num_tokens - static_cast<std::int64_t>(round) * params.tokens_per_round;
    const auto in_round = static_cast<std::uint32_t>(rest < params.tokens_per_round ? rest : params.tokens_per_round);
    warp::sync();
    bool good = true;
    if (lane_index() == 0) {
      // Tickets alternate between two words; do not take one that an unfinished earlier round still uses.
      std::uint64_t* finished = common.control.signal(common.heaps[common.rank], ControlWindow::Signal::combine_credit,
                                                      common.rank);
      good = round < 2 || wait_signal(finished, round_signal(rows.epoch, round - 1), params.wait, common.rank,
                                      Wanted::combine_credit);
      if (good && last_to_arrive(&common.state->combine_round_ticket[round & 1], in_round)) {
        // A round may be finished before the one in front of it, whose slots it must not give away: credit in order.
        good = round == 0 || wait_signal(finished, round_signal(rows.epoch, round), params.wait, common.rank,
                                         Wanted::combine_credit);
        for (int peer = 0; good && peer < common.num_ranks; ++peer) {
          store_release<Scope::system>(
              common.control.signal(common.heaps[peer], ControlWindow::Signal::combine_credit, common.rank),
              round_signal(rows.epoch, round + 1));
        }
      }
    }
    return warp::all(good);
  }

  /// Adds until the fetching warp says that nothing is left. False after a fault; the ring is emptied all the same.
  DEEP_EP_DEVICE bool add_all() const {
    const CombineParams& params = rows.params;
    bool good = true;
    float sum[kVectors][8];
    for (std::uint32_t taken = 0;; ++taken) {
      const auto slots = static_cast<std::uint32_t>(layout.slots);
      const std::uint32_t slot = taken % slots;
      mbarrier::wait(layout.full(memory)[slot], taken / slots & 1);
      const FetchedPiece piece = layout.fetched(memory)[slot];
      if (piece.token < 0) return good;
      const std::int64_t at = std::int64_t{piece.token} * params.row_bytes + piece.offset;
      if (piece.first) begin(sum, piece, at);
      if (piece.has_row) {
        const auto* data = reinterpret_cast<const Vec16*>(layout.slot(memory, slot));
        for (int v = 0; v < kVectors; ++v) {
          const int vector = vector_at(v);
          if (vector * sizeof(Vec16) < piece.bytes) add(sum[v], data[vector]);
        }
      }
      warp::sync();  // all lanes have read the slot
      if (lane_index() == 0) mbarrier::arrive(layout.empty(memory)[slot]);
      if (!piece.last) continue;
      store(sum, piece, at);
      // Warps take turns with what is left to do for a token.
      if (piece.offset + piece.bytes < params.row_bytes || piece.token % layout.adding_warps != warp) continue;
      if (params.combined_weights != nullptr) add_weights(piece.token);
      good = good && finish(piece.token);
    }
  }
};

}  // namespace deep_ep::device
