// Adds up rows of bfloat16 in fp32, in the registers of a warp. A lane loads its vectors of all rows before it adds the
// first: a peer's memory is far away. Ordinary loads: bulk loads from a peer's memory were slower on H200.
#pragma once

#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE Vec16 pack_sum(const float (&sum)[8]) {
  Vec16 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  return packed;
}

/// A piece of a row: a whole warp's registers.
struct RowSum {
  static constexpr int kVectors = 2;   ///< 16-byte vectors of a piece that a lane works on
  static constexpr int kTogether = 8;  ///< pieces whose loads are under way at once: a token's rows in a domain of 8
  static constexpr std::uint32_t kPieceBytes = kVectors * kWarpSize * sizeof(Vec16);

  float sum[kVectors][8] = {};

  /// Vectors of a piece that begins `offset` bytes into a row of `bytes` bytes; 0 behind its end.
  DEEP_EP_DEVICE static int vectors_at(std::uint32_t offset, std::uint32_t bytes) {
    const std::uint32_t rest = offset < bytes ? bytes - offset : 0;
    return static_cast<int>((rest < kPieceBytes ? rest : kPieceBytes) / sizeof(Vec16));
  }

  /// A piece of one row.
  struct Piece {
    Vec16 vector[kVectors];

    /// Loads `vectors` vectors from address `from` on. The others are zeros, and all of a row that is not `there`.
    DEEP_EP_DEVICE void load(std::uint64_t from, int vectors, bool there = true) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = lane_index() + v * kWarpSize;
        vector[v] = {};
        if (there && at < vectors) vector[v] = load_weak(reinterpret_cast<const Vec16*>(from) + at);
      }
    }
  };

  DEEP_EP_DEVICE void add(const Piece& piece) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[v][2 * i] += bf16_low(piece.vector[v].word[i]);
        sum[v][2 * i + 1] += bf16_high(piece.vector[v].word[i]);
      }
    }
  }

  /// Adds `vectors` vectors from `from` on.
  DEEP_EP_DEVICE void add_row(const std::byte* from, int vectors) {
    Piece piece;
    piece.load(reinterpret_cast<std::uint64_t>(from), vectors);
    add(piece);
  }

  /// Adds `vectors` vectors, beginning `offset` bytes into each row whose address a lane of `holders` holds, in the
  /// order of the lanes.
  DEEP_EP_DEVICE void add_rows(std::uint64_t address, std::uint32_t holders, std::uint32_t offset, int vectors) {
#pragma unroll 1
    while (holders != 0) {
      Piece loaded[kTogether];
      const int rows = count_bits(holders);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::uint64_t from = warp::shuffle(address, i < rows ? lowest_bit(holders) : 0) + offset;
        holders &= holders - 1;
        loaded[i].load(from, vectors, i < rows);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (i >= rows) break;
        add(loaded[i]);
      }
    }
  }

  DEEP_EP_DEVICE void store(std::byte* to, int vectors) const {
    for (int v = 0; v < kVectors; ++v) {
      const int vector = lane_index() + v * kWarpSize;
      if (vector < vectors) store_stream(reinterpret_cast<Vec16*>(to) + vector, pack_sum(sum[v]));
    }
  }
};

/// A row that is added, and its weights; `x` nullptr: there is none.
struct FoundRow {
  const std::byte* x = nullptr;
  const float* weights = nullptr;
};

/// The pieces of a row that a warp adds, one of `parts` that do: every `step` bytes one, from `first` bytes on.
struct RowShare {
  std::uint32_t first, step;

  DEEP_EP_DEVICE RowShare(int part = 0, int parts = 1)
      : first(static_cast<std::uint32_t>(part) * RowSum::kPieceBytes),
        step(static_cast<std::uint32_t>(parts) * RowSum::kPieceBytes) {}
};

/// By a whole warp: the sum of the biases and of the rows that up to `most` sources have, in the order of the sources.
/// `find(source)` says where a row is, and is asked by the lane whose index is the source's, or differs from it by a
/// multiple of 32.
template <class Find>
struct RowReduction {
  int most;
  Find find;
  FoundRow first;  ///< of the source of the lane's index
  std::uint32_t holders;
  const std::byte* bias[2];  ///< rows that come before all others; nullptr: none

  DEEP_EP_DEVICE RowReduction(int most_sources, Find find_row, const std::byte* bias_0 = nullptr,
                              const std::byte* bias_1 = nullptr)
      : most(most_sources),
        find(find_row),
        first(find(lane_index())),
        holders(warp::ballot(first.x != nullptr)),
        bias{bias_0 != nullptr ? bias_0 : bias_1, bias_0 != nullptr ? bias_1 : nullptr} {}

  /// Adds up a share of rows of `bytes` bytes, and stores the rounded sum in the row at `to`.
  DEEP_EP_DEVICE void add(std::byte* to, std::uint32_t bytes, const RowShare& share) const {
    const int rows = biases() + count_bits(holders);
    if (most > kWarpSize || rows > 4) {
      add_piecewise(to, bytes, share);
    } else if (rows > 2) {
      add_together<4>(to, bytes, share);
    } else if (rows == 2) {
      add_together<2>(to, bytes, share);
    } else {
      add_together<1>(to, bytes, share);
    }
  }

  DEEP_EP_DEVICE void add_weights(float* to, int num_topk) const {
    constexpr int kTogether = 8;  // loads under way at once: a peer's memory is far away
    float sum = 0;
    for_each_32([&](const FoundRow& row, std::uint32_t holding) {
      while (holding != 0) {
        float values[kTogether];
        for (int i = 0; i < kTogether; ++i) {
          values[i] = 0;
          if (holding == 0) continue;
          const std::uint64_t from = warp::shuffle(reinterpret_cast<std::uint64_t>(row.weights), lowest_bit(holding));
          holding &= holding - 1;
          if (lane_index() < num_topk) values[i] = load_weak(reinterpret_cast<const float*>(from) + lane_index());
        }
        for (int i = 0; i < kTogether; ++i) sum += values[i];
      }
    });
    if (lane_index() < num_topk) to[lane_index()] = sum;
  }

 private:
  /// `use(row, holders)` for the sources by 32 of them: the row of the lane's source, and which lanes have one.
  template <class Use>
  DEEP_EP_DEVICE void for_each_32(Use use) const {
#pragma unroll 1
    for (int at = 0; at < most; at += kWarpSize) {
      const FoundRow row = at == 0 ? first : find(at + lane_index());
      use(row, at == 0 ? holders : warp::ballot(row.x != nullptr));
    }
  }
  DEEP_EP_DEVICE int biases() const { return (bias[0] != nullptr ? 1 : 0) + (bias[1] != nullptr ? 1 : 0); }

  /// Of at most kRows rows: so many pieces of each are under way at once that there are kTogether in all. Those that
  /// are not there count as zeros, which change no sum that begins with zero.
  template <int kRows>
  DEEP_EP_DEVICE void add_together(std::byte* to, std::uint32_t bytes, const RowShare& share) const {
    constexpr int kPieces = RowSum::kTogether / kRows;
    const int rows = biases() + count_bits(holders);
    std::uint64_t row[kRows];
    std::uint32_t left = holders;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < biases()) {
        row[i] = reinterpret_cast<std::uint64_t>(bias[i < 2 ? i : 1]);
        continue;
      }
      row[i] = warp::shuffle(reinterpret_cast<std::uint64_t>(first.x), left == 0 ? 0 : lowest_bit(left));
      left &= left - 1;
    }
    const auto vectors_of = [&](std::uint32_t at) { return RowSum::vectors_at(at, bytes); };
#pragma unroll 1
    for (std::uint32_t offset = share.first; offset < bytes; offset += kPieces * share.step) {
      RowSum::Piece loaded[kPieces][kRows];
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const std::uint32_t at = offset + static_cast<std::uint32_t>(piece) * share.step;
#pragma unroll
        for (int i = 0; i < kRows; ++i) loaded[piece][i].load(row[i] + at, vectors_of(at), i < rows);
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const std::uint32_t at = offset + static_cast<std::uint32_t>(piece) * share.step;
        RowSum sum;
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum.add(loaded[piece][i]);
        sum.store(to + at, vectors_of(at));
      }
    }
  }

  /// Of many rows.
  DEEP_EP_DEVICE void add_piecewise(std::byte* to, std::uint32_t bytes, const RowShare& share) const {
#pragma unroll 1
    for (std::uint32_t offset = share.first; offset < bytes; offset += share.step) {
      const int vectors = RowSum::vectors_at(offset, bytes);
      RowSum sum;
      for (const std::byte* each : bias) {
        if (each != nullptr) sum.add_row(each + offset, vectors);
      }
      for_each_32([&](const FoundRow& row, std::uint32_t holding) {
        sum.add_rows(reinterpret_cast<std::uint64_t>(row.x), holding, offset, vectors);
      });
      sum.store(to + offset, vectors);
    }
  }
};

}  // namespace deep_ep::device
