// A row of combine as it travels from an expert rank to the token's owner, in tagged lines: bfloat16, or FP8.
#pragma once

#include <cmath>

#include "kernels/common/fp8_cast.hpp"
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

/// A lane's sum of its part of a line of bfloat16 rows. The last lane of a line also adds the tag, to a sum that is not
/// used.
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

// Rows of combine in FP8, and sums of rows: 128 channels (a group) share a float32 scale, by the cast of dispatch
// (fp8_scale). Lossy; a group with a NaN or an infinity becomes NaN.
//
// Each line can be read by itself: it has 112 channels, which are of two groups at most, and the scales of these. Its
// first seven lanes hold 16 channels each, all of one group; the last one the two scales, and the tag. So owners poll
// lines of many rows at once, as they do with bfloat16. Eight lines have seven groups: one warp casts so much at a
// time.

/// Places of a lane's channels, in groups. Groups are counted as lines are: from the row's beginning or from that of a
/// pass.
struct Fp8Lane {
  static constexpr int kChannels = 16;
  static constexpr int kChannelLanes = kLineLanes - 1;            ///< of a line
  static constexpr int kGroupParts = kScaleChannels / kChannels;  ///< lanes' parts that share a scale

  int channel;      ///< the first one; of the last lane the one after the line's
  int group;        ///< its group
  int first_group;  ///< of the line

  DEEP_EP_DEVICE explicit Fp8Lane(int line) {
    const int before = line * kChannelLanes;
    const int part = before + LineLane().part;
    channel = part * kChannels;
    group = part / kGroupParts;
    first_group = before / kGroupParts;
  }
};
static_assert(Fp8Lane::kChannelLanes * Fp8Lane::kChannels == CombineWire::kFp8LineChannels);

/// Casts a pass of channels, which lie in `stage` as bfloat16, and stores its lines into the row at `to`. By a whole
/// warp, which has synced. Afterwards each lane may overwrite the stage: the last lines are stored behind a sync, and
/// every lane has read its channels of them by then.
DEEP_EP_DEVICE void store_fp8_pass(const CombineWire& wire, const std::byte* stage, int pass, std::byte* to,
                                   std::uint64_t tag) {
  const auto* vectors = reinterpret_cast<const Vec16*>(stage);
  const int channels = wire.hidden - pass * CombineWire::kFp8PassChannels;  // of the pass, or more

  // 1. The scales: four lanes have a group's channels. The 29th has none, and stands for the group after the last.
  constexpr int kGroupLanes = 4;
  constexpr int kGroupVectors = kScaleChannels / kGroupLanes / 8;
  std::uint32_t amax = 0;
  if (lane_index() < CombineWire::kFp8PassChannels / (kGroupVectors * 8) &&
      lane_index() * kGroupVectors * 8 < channels) {
#pragma unroll
    for (int v = 0; v < kGroupVectors; ++v) {
      const std::uint32_t next = largest_magnitude(vectors[lane_index() * kGroupVectors + v]);
      amax = next > amax ? next : amax;
    }
  }
  const Fp8Scale scale = fp8_scale(bf16_low(largest_of_lanes<kGroupLanes>(amax)), false);

  // 2. The lines, four at a time.
#pragma unroll 1
  for (int first = 0; first < CombineWire::kFp8PassLines; first += kWarpLines) {
    const LineLane lane;
    const Fp8Lane mine(first + lane.line);
    const float multiplier = warp::shuffle(scale.multiplier, mine.group * kGroupLanes);
    const std::uint32_t one = bits_of(warp::shuffle(scale.inverse, mine.first_group * kGroupLanes));
    const std::uint32_t other = bits_of(warp::shuffle(scale.inverse, (mine.first_group + 1) * kGroupLanes));
    LinePart part{};
    if (lane.has_tag()) {
      part = {{std::uint64_t{other} << 32 | one, tag}};
    } else if (mine.channel < channels) {
      const Vec16* from = vectors + mine.channel / 8;
      part = {{to_e4m3(from[0], multiplier), to_e4m3(from[1], multiplier)}};
    }
    const auto line = static_cast<std::uint32_t>(pass * CombineWire::kFp8PassLines + first + lane.line);
    store_line(to + lane.byte_at(line), part, line < wire.lines());
  }
}

/// A lane's sum of its part of a line of rows in FP8. By whole warps: a line's last lane has the scales.
struct Fp8LineSum {
  float sum[Fp8Lane::kChannels] = {};

  /// Pieces of four lines.
  DEEP_EP_HOST_DEVICE static int units(const CombineWire& wire) {
    return (static_cast<int>(wire.lines()) + kWarpLines - 1) / kWarpLines;
  }

  /// The row as it has arrived.
  DEEP_EP_DEVICE void add(const LinePart& part, std::uint32_t line) {
    each(part, line, [&](int i, float value) { sum[i] += value; });
  }
  DEEP_EP_DEVICE void add_weighted(const LinePart& part, std::uint32_t line, float weight) {
    each(part, line, [&](int i, float value) { sum[i] = fmaf(weight, value, sum[i]); });
  }

  /// Rounds it into the row at `to`.
  DEEP_EP_DEVICE void store(std::byte* to, const CombineWire& wire, std::uint32_t line) const {
    const Fp8Lane mine(static_cast<int>(line));
    if (LineLane().has_tag() || mine.channel >= wire.hidden) return;
    auto* vectors = reinterpret_cast<Vec16*>(to) + mine.channel / 8;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      Vec16 packed;
#pragma unroll
      for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[8 * v + 2 * i], sum[8 * v + 2 * i + 1]);
      store_stream(vectors + v, packed);
    }
  }

 private:
  /// Tells the value of each of the lane's channels; in the last lane something of no meaning.
  template <class Tell>
  DEEP_EP_DEVICE static void each(const LinePart& part, std::uint32_t line, Tell tell) {
    const Fp8Lane mine(static_cast<int>(line));
    const std::uint64_t scales = warp::shuffle(part.word[0], lane_index() | (kLineLanes - 1));
    const float scale =
        float_from_bits(static_cast<std::uint32_t>(mine.group == mine.first_group ? scales : scales >> 32));
#pragma unroll
    for (int i = 0; i < Fp8Lane::kChannels; i += 2) {
      float low, high;
      unpack_e4m3(static_cast<std::uint32_t>(part.word[i / 8] >> (i % 8 * 8)) & 0xffffu, low, high);
      tell(i, rounded_product(low, scale));
      tell(i + 1, rounded_product(high, scale));
    }
  }
};

}  // namespace deep_ep::device::low_latency
