// The adding warps of combine: each takes a token of this rank, fetches the rows that the token's destination ranks
// hold, piece by piece through a ring in shared memory, and adds them in rank order in fp32.
//
// Where a row comes from makes no difference to the sum: a peer that has its rows in the heap is read over NVLink, one
// that pushes is read from our window once the row's flag is up.
#pragma once

#include "kernels/intranode/combine_shared.hpp"
#include "kernels/intranode/tickets.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// fp32 sums of one piece of a row: this lane's vectors are lane, lane + 32, ...
struct PieceSum {
  static constexpr int kVectors = kCombinePieceBytes / sizeof(Vec16) / kWarpSize;
  float sum[kVectors][8];
  int vectors;  ///< 16-byte vectors in the piece

  DEEP_EP_DEVICE static void unpack(const Vec16& vector, float (&out)[8]) {
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = bf16_low(vector.word[i]);
      out[2 * i + 1] = bf16_high(vector.word[i]);
    }
  }
  DEEP_EP_DEVICE void add(const Vec16* piece) {
    for (int v = 0; v < kVectors; ++v) {
      const int at = lane_index() + v * kWarpSize;
      if (at >= vectors) continue;
      float values[8];
      unpack(piece[at], values);
      for (int i = 0; i < 8; ++i) sum[v][i] += values[i];
    }
  }
  /// Starts at bias_0 + bias_1, or zero; `offset` is the piece's first byte in a [num_tokens, row] tensor.
  DEEP_EP_DEVICE void start(const std::byte* const (&bias)[2], std::int64_t offset, std::uint32_t bytes) {
    vectors = static_cast<int>(bytes / sizeof(Vec16));
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < 8; ++i) sum[v][i] = 0;
    }
    for (int b = 0; b < 2; ++b) {
      if (bias[b] == nullptr) continue;
      for (int v = 0; v < kVectors; ++v) {
        const int at = lane_index() + v * kWarpSize;
        if (at >= vectors) continue;
        float values[8];
        unpack(load_stream(reinterpret_cast<const Vec16*>(bias[b] + offset) + at), values);
        for (int i = 0; i < 8; ++i) sum[v][i] += values[i];
      }
    }
  }
  DEEP_EP_DEVICE void store(std::byte* row_piece) const {
    for (int v = 0; v < kVectors; ++v) {
      const int at = lane_index() + v * kWarpSize;
      if (at >= vectors) continue;
      Vec16 packed;
      for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[v][2 * i], sum[v][2 * i + 1]);
      store_stream(reinterpret_cast<Vec16*>(row_piece) + at, packed);
    }
  }
};

/// Walks the pieces that a warp needs, in the order in which it adds them: token, piece, rank.
struct PieceWalk {
  const CombineParams& params;
  int step;               ///< tokens between two of this warp
  int token;
  std::uint32_t offset;   ///< of the piece in its row
  int first_rank;         ///< lane i looks at rank first_rank + i
  std::int32_t row;       ///< this lane's rank: row of the token there, -1: none
  std::uint32_t left;     ///< ranks of this group still to come

  DEEP_EP_DEVICE PieceWalk(const CombineParams& p, int first_token, int token_step)
      : params(p), step(token_step), token(first_token), offset(0), first_rank(0), row(-1), left(0) {
    look();
  }
  DEEP_EP_DEVICE bool at_end() const { return token >= params.num_tokens; }

  /// Reads this group's rows.
  DEEP_EP_DEVICE void look() {
    if (at_end()) return;
    const int rank = first_rank + lane_index();
    row = rank < params.common.num_ranks
              ? load_weak(params.destination_row + std::int64_t{token} * params.common.num_ranks + rank)
              : -1;
    left = warp::ballot(row >= 0);
  }
  /// To the next piece that exists, possibly the present one. False at the end.
  DEEP_EP_DEVICE bool settle() {
    while (!at_end() && left == 0) {
      first_rank += kWarpSize;
      if (first_rank >= params.common.num_ranks) {
        first_rank = 0;
        offset += kCombinePieceBytes;
        if (offset >= params.row_bytes) {
          offset = 0;
          token += step;
        }
      }
      look();
    }
    return !at_end();
  }
  DEEP_EP_DEVICE int lane_of_rank() const { return lowest_bit(left); }
  DEEP_EP_DEVICE int rank() const { return first_rank + lane_of_rank(); }
  DEEP_EP_DEVICE std::uint32_t bytes() const {
    const std::uint32_t rest = params.row_bytes - offset;
    return rest < kCombinePieceBytes ? rest : kCombinePieceBytes;
  }
  DEEP_EP_DEVICE void pass() { left &= left - 1; }
};

struct CombineAdder {
  const CombineParams& params;
  const CombinePeer* peers;
  const CombineShared& layout;
  std::byte* memory;
  std::uint64_t epoch;
  int first_token, step;         ///< tokens of this warp
  std::uint32_t adding_warps;    ///< of the whole grid
  PieceWalk ahead;               ///< the next piece to fetch
  std::uint32_t fetched = 0, added = 0;

  DEEP_EP_DEVICE CombineAdder(const CombineParams& p, const CombinePeer* peer_table, const CombineShared& shared,
                              std::byte* shared_memory, std::uint64_t call_epoch, int warp, int warps)
      : params(p),
        peers(peer_table),
        layout(shared),
        memory(shared_memory),
        epoch(call_epoch),
        first_token(warp),
        step(warps),
        adding_warps(static_cast<std::uint32_t>(warps)),
        ahead(p, warp, warps) {}

  DEEP_EP_DEVICE std::uint64_t round_of(int token) const {
    return static_cast<std::uint64_t>(token / params.tokens_per_round);
  }
  DEEP_EP_DEVICE std::byte* window_row(int source, int token) const {
    const std::int64_t slot = std::int64_t{source} * params.window_tokens + token % params.window_tokens;
    return params.window + slot * params.window_row_bytes;
  }

  /// Is the next row there? Pulled rows are; for a pushed one looks at its flag, or waits for it.
  /// -1: a fault, 0: not yet, 1: yes.
  DEEP_EP_DEVICE int arrived(bool block) const {
    const int source = ahead.rank();
    if (peers[source].x != nullptr || ahead.offset != 0) return 1;  // a row's flag was seen with its first piece
    int state = 0;
    if (lane_index() == 0) {
      const std::uint64_t* flag = params.common.control.pushed_flag(params.common.heaps[params.common.rank], source,
                                                                    ahead.token % params.window_tokens);
      const std::uint64_t expected = round_signal(epoch, round_of(ahead.token) + 1);
      if (block) {
        state = wait_signal(flag, expected, params.wait, source, Wanted::combine_rows) ? 1 : -1;
      } else {
        state = load_acquire<Scope::system>(flag) >= expected ? 1 : 0;
      }
      if (state == 1) bulk::fence_global();  // what the flag promises is read by the copy engine
    }
    return warp::shuffle(state, 0);
  }

  DEEP_EP_DEVICE void fetch() {
    const int source = ahead.rank();
    const std::int64_t row = warp::shuffle(ahead.row, ahead.lane_of_rank());
    if (lane_index() == 0) {
      const auto slot = static_cast<int>(fetched % static_cast<std::uint32_t>(params.slots));
      const std::byte* from =
          (peers[source].x != nullptr ? peers[source].x + row * params.row_bytes : window_row(source, ahead.token)) +
          ahead.offset;
      Mbarrier& barrier = layout.barriers(memory, warp_index())[slot];
      mbarrier::arrive_expect_bytes(barrier, ahead.bytes());
      bulk::load(layout.slot(memory, warp_index(), slot), from, ahead.bytes(), barrier);
    }
    ++fetched;
    ahead.pass();
  }

  /// Keeps the ring full. Waits for a row only when the ring is empty: a row that waits for a credit of ours must not
  /// keep us from adding what is there. False after a fault.
  DEEP_EP_DEVICE bool fetch_ahead() {
    while (fetched - added < static_cast<std::uint32_t>(params.slots) && ahead.settle()) {
      const int state = arrived(fetched == added);
      if (state < 0) return false;
      if (state == 0) break;
      fetch();
    }
    return true;
  }

  /// Adds the weights that the token's destination ranks hold, slot by slot, in rank order.
  DEEP_EP_DEVICE void add_weights(int token) const {
    float sum = 0;
    for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      const int rank = first_rank + lane_index();
      const std::int32_t row =
          rank < params.common.num_ranks
              ? load_weak(params.destination_row + std::int64_t{token} * params.common.num_ranks + rank)
              : -1;
      // Where this lane's rank keeps the token's weights.
      std::uint64_t at = 0;
      if (row >= 0) {
        const std::byte* weights =
            peers[rank].x != nullptr
                ? reinterpret_cast<const std::byte*>(peers[rank].topk_weights + std::int64_t{row} * params.num_topk)
                : window_row(rank, token) + params.row_bytes;
        at = reinterpret_cast<std::uint64_t>(weights);
      }
      constexpr int kTogether = 4;  // loads under way at once: a peer's memory is far away
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

  /// Adds one token. False after a fault.
  DEEP_EP_DEVICE bool add_token(int token) {
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += kCombinePieceBytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const std::int64_t at = std::int64_t{token} * params.row_bytes + offset;
      PieceSum piece;
      piece.start(params.bias, at, rest < kCombinePieceBytes ? rest : kCombinePieceBytes);
      for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
        const int rank = first_rank + lane_index();
        const bool member =
            rank < params.common.num_ranks &&
            load_weak(params.destination_row + std::int64_t{token} * params.common.num_ranks + rank) >= 0;
        for (int pieces = count_bits(warp::ballot(member)); pieces > 0; --pieces) {
          if (!fetch_ahead()) return false;
          const std::uint32_t slots = static_cast<std::uint32_t>(params.slots);
          const auto slot = static_cast<int>(added % slots);
          mbarrier::wait(layout.barriers(memory, warp_index())[slot], added / slots & 1);
          piece.add(reinterpret_cast<const Vec16*>(layout.slot(memory, warp_index(), slot)));
          warp::sync();  // all lanes have read the slot: it may be filled again
          ++added;
        }
      }
      piece.store(params.combined_x + at);
    }
    if (params.combined_weights != nullptr) add_weights(token);
    return true;
  }

  /// This warp has added its tokens of `round`. The rank's last warp to say so gives the pushing peers credit.
  DEEP_EP_DEVICE bool finish_round(std::uint64_t round) const {
    const IntranodeParams& common = params.common;
    warp::sync();
    bool good = true;
    if (lane_index() == 0) {
      // Tickets alternate between two words; do not take one that an unfinished earlier round still uses.
      std::uint64_t* finished = common.control.signal(common.heaps[common.rank], ControlWindow::Signal::combine_credit,
                                                      common.rank);
      good = round < 2 || wait_signal(finished, round_signal(epoch, round - 1), params.wait, common.rank,
                                      Wanted::combine_credit);
      if (good && last_to_arrive(&common.state->combine_round_ticket[round & 1], adding_warps)) {
        for (int peer = 0; peer < common.num_ranks; ++peer) {
          store_release<Scope::system>(
              common.control.signal(common.heaps[peer], ControlWindow::Signal::combine_credit, common.rank),
              round_signal(epoch, round + 1));
        }
      }
    }
    return warp::all(good);
  }

  /// Adds all of this warp's tokens.
  DEEP_EP_DEVICE bool add_all() {
    const std::uint64_t rounds =
        params.num_tokens > params.window_tokens
            ? static_cast<std::uint64_t>((params.num_tokens + params.tokens_per_round - 1) / params.tokens_per_round)
            : 0;  // everything fits the window at once: nobody needs credit
    std::uint64_t round = 0;
    for (int token = first_token; token < params.num_tokens; token += step) {
      for (; rounds != 0 && round < round_of(token); ++round) {
        if (!finish_round(round)) return false;
      }
      if (!add_token(token)) return false;
    }
    for (; round < rounds; ++round) {
      if (!finish_round(round)) return false;
    }
    return true;
  }
};

}  // namespace deep_ep::device
