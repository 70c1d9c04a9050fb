// A row of combine as it travels from an expert rank to the token's owner, in tagged lines of bfloat16.
#pragma once

#include <cmath>

#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device::low_latency {

struct CombineWire {
  int hidden;

  DEEP_EP_HOST_DEVICE int vectors() const { return hidden / 8; }  ///< of 16 bytes
  DEEP_EP_HOST_DEVICE std::uint32_t lines() const { return tagged_lines(2 * static_cast<std::uint32_t>(hidden)); }
  /// In the window.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return lines() * kTaggedLine; }
  /// Pieces of four lines, whose payload is 30 vectors: what a warp works on at once.
  static constexpr int kPieceVectors = kWarpLines * static_cast<int>(kTaggedPayload) / 16;
  DEEP_EP_HOST_DEVICE int pieces() const { return (vectors() + kPieceVectors - 1) / kPieceVectors; }
};

/// The part of a row's channels that one of `warps` warps sums: every `warps`-th piece, step by step, one vector per
/// lane. The sums go into a stage of the warp's own, from where they leave in lines.
struct WarpShare {
  static constexpr int kVectors = CombineWire::kPieceVectors;
  int warp;
  Divisor warps;

  DEEP_EP_HOST_DEVICE int steps(const CombineWire& wire) const { return (wire.pieces() - warp + warps - 1) / warps; }
  DEEP_EP_HOST_DEVICE std::size_t stage_bytes(const CombineWire& wire) const {
    return static_cast<std::size_t>(steps(wire)) * kVectors * 16;
  }
  DEEP_EP_DEVICE int unit(int step) const { return warp + step * warps; }
  /// -1: the lane has none.
  DEEP_EP_DEVICE int vector(const CombineWire& wire, int step) const {
    const int vector = unit(step) * kVectors + lane_index();
    return lane_index() < kVectors && vector < wire.vectors() ? vector : -1;
  }
  /// Where the lane's vector of a step lies in the stage.
  DEEP_EP_DEVICE Vec16* staged(std::byte* stage, int step) const {
    return reinterpret_cast<Vec16*>(stage) + step * kVectors + lane_index();
  }
};

DEEP_EP_DEVICE void add_bf16(float (&sum)[8], const Vec16& vector) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_low(vector.word[i]);
    sum[2 * i + 1] += bf16_high(vector.word[i]);
  }
}

DEEP_EP_DEVICE void add_weighted(float (&sum)[8], const Vec16& vector, float weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, bf16_low(vector.word[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, bf16_high(vector.word[i]), sum[2 * i + 1]);
  }
}

DEEP_EP_DEVICE Vec16 pack_sum(const float (&sum)[8]) {
  Vec16 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  return packed;
}

/// A lane's sum of its part of a line of bfloat16 rows. The last lane of a line also adds the tag, to a sum that is not
/// used.
struct LineSum {
  float sum[8] = {};

  DEEP_EP_DEVICE void add(const LinePart& part) { add_bf16(sum, vector_of(part)); }
  DEEP_EP_DEVICE void add_weighted(const LinePart& part, float weight) {
    low_latency::add_weighted(sum, vector_of(part), weight);
  }
  DEEP_EP_DEVICE Vec16 packed() const { return pack_sum(sum); }

  /// Rounds it into the row at `to`.
  DEEP_EP_DEVICE void store(std::byte* to, const CombineWire& wire, std::uint32_t line) const {
    const LineLane lane;
    const Vec16 rounded = packed();
    const std::uint32_t at = lane.payload_at(line);
    for (int word = 0; word < lane.words(); ++word) {
      const std::uint32_t byte = at + 8 * static_cast<std::uint32_t>(word);
      if (line >= wire.lines() || byte >= 2 * static_cast<std::uint32_t>(wire.hidden)) break;
      store_stream(reinterpret_cast<std::uint64_t*>(to + byte),
                   std::uint64_t{rounded.word[2 * word + 1]} << 32 | rounded.word[2 * word]);
    }
  }

 private:
  DEEP_EP_DEVICE static Vec16 vector_of(const LinePart& part) {
    return {{static_cast<std::uint32_t>(part.word[0]), static_cast<std::uint32_t>(part.word[0] >> 32),
             static_cast<std::uint32_t>(part.word[1]), static_cast<std::uint32_t>(part.word[1] >> 32)}};
  }
};

}  // namespace deep_ep::device::low_latency
