// The adding warps of combine: each takes a part of a token's row and adds, in rank order and in fp32, what the token's
// destination ranks hold of it.
//
// Where a row comes from makes no difference to the sum: a peer that has its rows in the heap is read over NVLink, one
// that pushes is read from our window once the row's flag is up. A lane loads its vectors of all rows before it adds the
// first: a peer's memory is far away, and only loads under way at once hide that.
#pragma once

#include "kernels/intranode/combine_shared.hpp"
#include "kernels/intranode/tickets.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

struct CombineAdder {
  static constexpr int kVectors = 2;   ///< 16-byte vectors of a row that a lane works on at once
  static constexpr int kTogether = 8;  ///< rows whose loads are under way at once
  static constexpr std::uint32_t kPieceBytes = kVectors * kWarpSize * sizeof(Vec16);

  const CombineParams& params;
  const CombinePeer* peers;
  std::uint64_t epoch;

  DEEP_EP_DEVICE std::uint64_t round_of(int token) const {
    return static_cast<std::uint64_t>(token / params.tokens_per_round);
  }
  DEEP_EP_DEVICE std::byte* window_row(int source, int token) const {
    const std::int64_t slot = std::int64_t{source} * params.window_tokens + token % params.window_tokens;
    return params.window + slot * params.window_row_bytes;
  }
  DEEP_EP_DEVICE std::int32_t row_at(int token, int rank) const {
    if (rank >= params.common.num_ranks) return -1;
    return load_stream(params.destination_row + std::int64_t{token} * params.common.num_ranks + rank);
  }

  /// Where `rank` has the token's row `row`. Waits for a pushed one; nullptr after a fault.
  DEEP_EP_DEVICE const std::byte* await_row(int token, int rank, std::int32_t row) const {
    if (peers[rank].x != nullptr) return peers[rank].x + std::int64_t{row} * params.row_bytes;
    const IntranodeParams& common = params.common;
    const std::uint64_t* flag =
        common.control.pushed_flag(common.heaps[common.rank], rank, token % params.window_tokens);
    if (!wait_signal(flag, round_signal(epoch, round_of(token) + 1), params.wait, rank, Wanted::combine_rows)) {
      return nullptr;
    }
    return window_row(rank, token);
  }

  DEEP_EP_DEVICE static void add(float (&sum)[kVectors][8], int v, const Vec16& vector) {
    for (int i = 0; i < 4; ++i) {
      sum[v][2 * i] += bf16_low(vector.word[i]);
      sum[v][2 * i + 1] += bf16_high(vector.word[i]);
    }
  }

  /// Adds `vectors` vectors, beginning `offset` bytes into each row whose address a lane of `holders` holds.
  DEEP_EP_DEVICE void add_rows(float (&sum)[kVectors][8], std::uint64_t address, std::uint32_t holders,
                               std::uint32_t offset, int vectors) const {
    while (holders != 0) {
      Vec16 loaded[kTogether][kVectors];
      int rows = 0;
      for (int i = 0; i < kTogether; ++i) {
        if (holders == 0) continue;
        const auto* from = reinterpret_cast<const Vec16*>(warp::shuffle(address, lowest_bit(holders)) + offset);
        holders &= holders - 1;
        ++rows;
        for (int v = 0; v < kVectors; ++v) {
          const int at = lane_index() + v * kWarpSize;
          if (at < vectors) loaded[i][v] = load_weak(from + at);
        }
      }
      for (int i = 0; i < kTogether; ++i) {
        for (int v = 0; v < kVectors; ++v) {
          if (i < rows && lane_index() + v * kWarpSize < vectors) add(sum, v, loaded[i][v]);
        }
      }
    }
  }

  /// Adds the weights that the token's destination ranks hold, slot by slot, in rank order.
  DEEP_EP_DEVICE void add_weights(int token) const {
    float sum = 0;
    for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      const int rank = first_rank + lane_index();
      const std::int32_t row = row_at(token, rank);
      // Where this lane's rank keeps the token's weights.
      std::uint64_t at = 0;
      if (row >= 0) {
        const std::byte* weights =
            peers[rank].x != nullptr
                ? reinterpret_cast<const std::byte*>(peers[rank].topk_weights + std::int64_t{row} * params.num_topk)
                : window_row(rank, token) + params.row_bytes;
        at = reinterpret_cast<std::uint64_t>(weights);
      }
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

  /// The ranks from `first_rank` on, one a lane: which have a row of the token (a bit each), and where.
  /// `good` becomes false after a fault.
  DEEP_EP_DEVICE std::uint32_t find_rows(int token, int first_rank, std::uint64_t& address, bool& good) const {
    const int rank = first_rank + lane_index();
    const std::int32_t row = row_at(token, rank);
    address = row < 0 ? 0 : reinterpret_cast<std::uint64_t>(await_row(token, rank, row));
    good = warp::all(row < 0 || address != 0) && good;
    return warp::ballot(row >= 0);
  }

  /// Adds one part of a token's row. False after a fault.
  DEEP_EP_DEVICE bool add_part(int token, std::uint32_t part) const {
    bool good = true;
    std::uint64_t address = 0;
    const std::uint32_t holders = find_rows(token, 0, address, good);
    if (!good) return false;
    const std::uint32_t pieces = (params.row_bytes + kPieceBytes - 1) / kPieceBytes;
    const auto parts = static_cast<std::uint32_t>(params.parts);
    const std::uint32_t begin = pieces * part / parts * kPieceBytes;
    const std::uint32_t end = pieces * (part + 1) / parts * kPieceBytes;
    for (std::uint32_t offset = begin; offset < end; offset += kPieceBytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const int vectors = static_cast<int>((rest < kPieceBytes ? rest : kPieceBytes) / sizeof(Vec16));
      const std::int64_t at = std::int64_t{token} * params.row_bytes + offset;
      float sum[kVectors][8] = {};
      for (const std::byte* bias : params.bias) {
        for (int v = 0; bias != nullptr && v < kVectors; ++v) {
          const int vector = lane_index() + v * kWarpSize;
          if (vector < vectors) add(sum, v, load_stream(reinterpret_cast<const Vec16*>(bias + at) + vector));
        }
      }
      add_rows(sum, address, holders, offset, vectors);
      for (int first_rank = kWarpSize; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
        std::uint64_t later_address = 0;
        const std::uint32_t later = find_rows(token, first_rank, later_address, good);
        if (!good) return false;
        add_rows(sum, later_address, later, offset, vectors);
      }
      for (int v = 0; v < kVectors; ++v) {
        const int vector = lane_index() + v * kWarpSize;
        if (vector >= vectors) continue;
        Vec16 packed;
        for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[v][2 * i], sum[v][2 * i + 1]);
        store_stream(reinterpret_cast<Vec16*>(params.combined_x + at) + vector, packed);
      }
    }
    if (part == 0 && params.combined_weights != nullptr) add_weights(token);
    return true;
  }

  /// This warp has added a part of `token`. The warp with the last part of a round gives the pushing peers credit.
  DEEP_EP_DEVICE bool finish(int token) const {
    if (params.num_tokens <= params.window_tokens) return true;  // the window holds everything: nobody needs credit
    const IntranodeParams& common = params.common;
    const std::uint64_t round = round_of(token);
    const std::int64_t rest = params.num_tokens - static_cast<std::int64_t>(round) * params.tokens_per_round;
    const auto in_round = static_cast<std::uint32_t>((rest < params.tokens_per_round ? rest : params.tokens_per_round) *
                                                     params.parts);
    warp::sync();
    bool good = true;
    if (lane_index() == 0) {
      // Tickets alternate between two words; do not take one that an unfinished earlier round still uses.
      std::uint64_t* finished = common.control.signal(common.heaps[common.rank], ControlWindow::Signal::combine_credit,
                                                      common.rank);
      good = round < 2 || wait_signal(finished, round_signal(epoch, round - 1), params.wait, common.rank,
                                      Wanted::combine_credit);
      if (good && last_to_arrive(&common.state->combine_round_ticket[round & 1], in_round)) {
        // A round may be finished before the one in front of it, whose slots it must not give away: credit in order.
        good = round == 0 ||
               wait_signal(finished, round_signal(epoch, round), params.wait, common.rank, Wanted::combine_credit);
        for (int peer = 0; good && peer < common.num_ranks; ++peer) {
          store_release<Scope::system>(
              common.control.signal(common.heaps[peer], ControlWindow::Signal::combine_credit, common.rank),
              round_signal(epoch, round + 1));
        }
      }
    }
    return warp::all(good);
  }

  /// Takes parts and adds them until none is left. False after a fault.
  DEEP_EP_DEVICE bool add_all() const {
    std::uint32_t* next = &params.common.state->combine_next_part;
    const auto parts = static_cast<std::uint32_t>(params.parts);
    const std::uint32_t all = static_cast<std::uint32_t>(params.num_tokens) * parts;
    for (std::uint32_t taken = take_next(next); taken < all;) {
      const std::uint32_t upcoming = ask_next(next);  // the answer comes while we add
      const auto token = static_cast<int>(taken / parts);
      if (!add_part(token, taken % parts) || !finish(token)) return false;
      taken = warp::shuffle(upcoming, 0);
    }
    return true;
  }
};

}  // namespace deep_ep::device
