// A row of combine as it travels from an expert rank to the token's owner, in tagged lines: bfloat16, or FP8 (fp8.hpp).
#pragma once

#include <cmath>

#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

struct CombineWire {
  int hidden;
  bool fp8;

  // FP8: a line has 112 channels, so eight lines (a pass) have those of seven scales. A warp casts a pass at a time.
  static constexpr int kFp8LineChannels = 112;
  static constexpr int kFp8PassLines = 8;
  static constexpr int kFp8PassChannels = kFp8PassLines * kFp8LineChannels;
  static constexpr std::uint32_t kFp8PassBytes = 2 * kFp8PassChannels;  ///< in shared memory, as bfloat16
  DEEP_EP_HOST_DEVICE int passes() const { return (hidden + kFp8PassChannels - 1) / kFp8PassChannels; }

  DEEP_EP_HOST_DEVICE int vectors() const { return hidden / 8; }  ///< of 16 bytes, as bfloat16
  DEEP_EP_HOST_DEVICE std::uint32_t lines() const {
    return fp8 ? static_cast<std::uint32_t>((hidden + kFp8LineChannels - 1) / kFp8LineChannels)
               : tagged_lines(2 * static_cast<std::uint32_t>(hidden));
  }
  /// In the window.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return lines() * kTaggedLine; }
};

/// The part of a row's channels that one of `warps` warps sums: step by step, one vector per lane. The sums go into a
/// stage of the warp's own, from where they leave in lines.
template <bool kFp8>
struct WarpShare;

/// Every `warps`-th four lines, whose payload is 30 vectors.
template <>
struct WarpShare<false> {
  static constexpr int kVectors = kWarpLines * static_cast<int>(kTaggedPayload) / 16;
  int warp;
  Divisor warps;

  DEEP_EP_HOST_DEVICE static int units(const CombineWire& wire) { return (wire.vectors() + kVectors - 1) / kVectors; }
  DEEP_EP_HOST_DEVICE int steps(const CombineWire& wire) const { return (units(wire) - warp + warps - 1) / warps; }
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

/// Every `warps`-th pass, in four steps.
template <>
struct WarpShare<true> {
  static constexpr int kPassVectors = CombineWire::kFp8PassChannels / 8;
  static constexpr int kSteps = (kPassVectors + kWarpSize - 1) / kWarpSize;
  static_assert(CombineWire::kFp8PassBytes % kLine == 0);
  int warp;
  Divisor warps;

  DEEP_EP_HOST_DEVICE int passes(const CombineWire& wire) const { return (wire.passes() - warp + warps - 1) / warps; }
  DEEP_EP_HOST_DEVICE int steps(const CombineWire& wire) const { return passes(wire) * kSteps; }
  DEEP_EP_HOST_DEVICE std::size_t stage_bytes(const CombineWire& wire) const {
    return static_cast<std::size_t>(passes(wire)) * CombineWire::kFp8PassBytes;
  }
  DEEP_EP_DEVICE int pass(int step) const { return warp + step / kSteps * warps; }
  DEEP_EP_DEVICE int vector(const CombineWire& wire, int step) const {
    const int vector = pass(step) * kPassVectors + in_pass(step);
    return in_pass(step) < kPassVectors && vector < wire.vectors() ? vector : -1;
  }
  DEEP_EP_DEVICE Vec16* staged(std::byte* stage, int step) const {
    return reinterpret_cast<Vec16*>(stage_of(stage, step)) + in_pass(step);
  }
  /// Of the pass that a step belongs to.
  DEEP_EP_DEVICE static std::byte* stage_of(std::byte* stage, int step) {
    return stage + static_cast<std::uint32_t>(step / kSteps) * CombineWire::kFp8PassBytes;
  }

 private:
  DEEP_EP_DEVICE static int in_pass(int step) { return step % kSteps * kWarpSize + lane_index(); }
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

/// What a lane adds up of a line of bfloat16 rows; in a line's last lane the tag is added to a sum that nobody looks
/// at.
struct Bf16LineSum {
  float sum[8] = {};

  /// Pieces of four lines.
  DEEP_EP_HOST_DEVICE static int units(const CombineWire& wire) { return WarpShare<false>::units(wire); }

  DEEP_EP_DEVICE void add(const LinePart& part, std::uint32_t) { add_bf16(sum, vector_of(part)); }
  DEEP_EP_DEVICE void add_weighted(const LinePart& part, std::uint32_t, float weight) {
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
