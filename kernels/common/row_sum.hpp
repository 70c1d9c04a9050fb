// Adds up rows of bfloat16 in fp32, in the registers of a warp. A lane loads its vectors of all rows before it adds the
// first: a peer's memory is far away, and only loads under way at once hide that. Ordinary loads: bulk loads from a
// peer's memory were slower on H200, however many SMs issued them.
#pragma once

#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// A piece of a row: a whole warp's registers.
struct RowSum {
  /// 16-byte vectors of a row that a lane works on at once. Two would spill on sm_100a.
  static constexpr int kVectors = kBlackwell ? 1 : 2;
  static constexpr int kTogether = 8;  ///< rows whose loads are under way at once: all of a token, in one domain of 8
  static constexpr std::uint32_t kPieceBytes = kVectors * kWarpSize * sizeof(Vec16);

  float sum[kVectors][8] = {};

  DEEP_EP_DEVICE void begin_with(float value) {
    for (auto& of_vector : sum) {
      for (float& element : of_vector) element = value;
    }
  }

  DEEP_EP_DEVICE void add(int v, const Vec16& vector) {
    for (int i = 0; i < 4; ++i) {
      sum[v][2 * i] += bf16_low(vector.word[i]);
      sum[v][2 * i + 1] += bf16_high(vector.word[i]);
    }
  }

  /// Adds `vectors` vectors from `from`, which nobody writes meanwhile.
  DEEP_EP_DEVICE void add_stream(const std::byte* from, int vectors) {
    for (int v = 0; v < kVectors; ++v) {
      const int vector = lane_index() + v * kWarpSize;
      if (vector < vectors) add(v, load_stream(reinterpret_cast<const Vec16*>(from) + vector));
    }
  }

  /// Adds `vectors` vectors, beginning `offset` bytes into each row whose address a lane of `holders` holds, in the
  /// order of the lanes.
  DEEP_EP_DEVICE void add_rows(std::uint64_t address, std::uint32_t holders, std::uint32_t offset, int vectors) {
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
          if (i < rows && lane_index() + v * kWarpSize < vectors) add(v, loaded[i][v]);
        }
      }
    }
  }

  /// Adds whole rows of `bytes` bytes, at most kTogether of them, in the order of add_rows, and stores the rounded sum
  /// at `to`. Where rows are few, several pieces are under way at once. `begin(sum, offset, vectors)` comes before a
  /// piece.
  template <class Begin>
  DEEP_EP_DEVICE static void add_whole_rows(std::byte* to, std::uint32_t bytes, std::uint64_t address,
                                            std::uint32_t holders, Begin begin) {
    const int rows = count_bits(holders);
    const int loads = rows == 0 ? 1 : kTogether / rows * rows;  // pieces of all rows
    const auto vectors_at = [&](std::uint32_t offset) {
      const std::uint32_t rest = offset < bytes ? bytes - offset : 0;
      return static_cast<int>((rest < kPieceBytes ? rest : kPieceBytes) / sizeof(Vec16));
    };
    for (std::uint32_t offset = 0, end = 0; offset < bytes; offset = end) {
      // 1. Load: all rows of a piece, then those of the next.
      Vec16 loaded[kTogether][kVectors];
      std::uint32_t left = holders;
      for (int i = 0; i < kTogether; ++i) {
        if (i >= loads) continue;
        const std::uint64_t row = rows == 0 ? 0 : warp::shuffle(address, lowest_bit(left));
        const int vectors = rows == 0 ? 0 : vectors_at(end);
        for (int v = 0; v < kVectors; ++v) {
          const int at = lane_index() + v * kWarpSize;
          if (at < vectors) loaded[i][v] = load_weak(reinterpret_cast<const Vec16*>(row + end) + at);
        }
        left &= left - 1;
        if (left != 0) continue;
        left = holders;
        end += kPieceBytes;
      }
      // 2. Add in the same order, and store each piece.
      RowSum sum;
      std::uint32_t piece = offset;
      for (int i = 0; i < kTogether; ++i) {
        if (i >= loads) continue;
        const int vectors = vectors_at(piece);
        if (left == holders) begin(sum, piece, vectors);
        for (int v = 0; v < kVectors; ++v) {
          if (rows != 0 && lane_index() + v * kWarpSize < vectors) sum.add(v, loaded[i][v]);
        }
        left &= left - 1;
        if (left != 0) continue;
        sum.store(to + piece, vectors);
        sum = RowSum{};
        left = holders;
        piece += kPieceBytes;
      }
    }
  }

  /// Rounds, and stores `vectors` vectors from `to` on.
  DEEP_EP_DEVICE void store(std::byte* to, int vectors) const {
    for (int v = 0; v < kVectors; ++v) {
      const int vector = lane_index() + v * kWarpSize;
      if (vector >= vectors) continue;
      Vec16 packed;
      for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[v][2 * i], sum[v][2 * i + 1]);
      store_stream(reinterpret_cast<Vec16*>(to) + vector, packed);
    }
  }
};

/// By a whole warp: adds to a lane's `sum` the weights of its slot, of rows whose weights lie where the lanes of
/// `holders` say, in the order of the lanes.
DEEP_EP_DEVICE float add_weights(float sum, std::uint64_t at, std::uint32_t holders, int num_topk) {
  constexpr int kTogether = 8;  // loads under way at once: a peer's memory is far away
  while (holders != 0) {
    float values[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      values[i] = 0;
      if (holders == 0) continue;
      const std::uint64_t from = warp::shuffle(at, lowest_bit(holders));
      holders &= holders - 1;
      if (lane_index() < num_topk) values[i] = load_weak(reinterpret_cast<const float*>(from) + lane_index());
    }
    for (int i = 0; i < kTogether; ++i) sum += values[i];
  }
  return sum;
}

}  // namespace deep_ep::device
