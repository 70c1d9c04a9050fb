// A row of combine as it travels from an expert rank to the token's owner, in tagged lines: bfloat16; FP8 (fp8.hpp); or
// with LogFMT in chunks, each at lines of its own: a range for each group of channels, and then the channels, encoded
// or not. So a chunk can be read by itself, and its first line says how many there are. As many lines as a chunk has if
// it is encoded follow those of the chunk before; what it has beyond lies behind those of all chunks. So a row that is
// encoded as a whole lies in one piece, and is one message to a far owner.
//
// One warp makes what lies together: four lines of bfloat16, or a pass of channels that are encoded. It reads four
// lines of bfloat16 or FP8, or a pass in LogFMT.
#pragma once

#include "kernels/low_latency/combine/logfmt.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

struct CombineWire {
  int hidden;
  CombineEncoding encoding;

  // FP8: a line has 112 channels, so eight lines have those of seven scales.
  static constexpr int kFp8LineChannels = 112;
  static constexpr int kFp8PassLines = 8;
  static constexpr std::uint32_t kFp8PassBytes = 2 * kFp8PassLines * kFp8LineChannels;

  DEEP_EP_HOST_DEVICE bool encoded() const { return encoding != CombineEncoding::bf16; }
  DEEP_EP_HOST_DEVICE bool logfmt() const { return encoding == CombineEncoding::logfmt; }
  DEEP_EP_HOST_DEVICE bool fp8() const { return encoding == CombineEncoding::fp8; }
  DEEP_EP_HOST_DEVICE int vectors() const { return hidden / 8; }  ///< of 16 bytes, unencoded
  DEEP_EP_HOST_DEVICE std::uint32_t lines() const {
    if (fp8()) return static_cast<std::uint32_t>((hidden + kFp8LineChannels - 1) / kFp8LineChannels);
    return logfmt() ? static_cast<std::uint32_t>(chunks()) * chunk_lines()
                    : tagged_lines(2 * static_cast<std::uint32_t>(hidden));
  }
  /// In the window.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return lines() * kTaggedLine; }

  /// Where rows are encoded: channels of a warp at a time. LogFMT: one chunk, or two small ones.
  DEEP_EP_HOST_DEVICE int pass_channels() const { return fp8() ? kFp8PassLines * kFp8LineChannels : kLogfmtPass; }
  DEEP_EP_HOST_DEVICE int passes() const { return (hidden + pass_channels() - 1) / pass_channels(); }
  /// Of a pass in shared memory: its channels in bfloat16; with LogFMT what it has as lines, ranges among them.
  DEEP_EP_HOST_DEVICE std::uint32_t pass_bytes() const { return fp8() ? kFp8PassBytes : kLogfmtPassBytes; }

  // LogFMT.
  static constexpr int kLogfmtPass = 1024;
  static constexpr std::uint32_t kLogfmtPassBytes = 2176;
  DEEP_EP_HOST_DEVICE int chunk() const { return logfmt::chunk_channels(hidden); }
  DEEP_EP_HOST_DEVICE int chunks() const { return (hidden + chunk() - 1) / chunk(); }
  DEEP_EP_HOST_DEVICE int chunk_width(int index) const {
    return hidden - index * chunk() < chunk() ? hidden - index * chunk() : chunk();
  }
  /// Bytes of a chunk before its channels.
  DEEP_EP_HOST_DEVICE std::uint32_t ranges_bytes() const {
    return static_cast<std::uint32_t>(chunk()) / logfmt::kGroup * 4;
  }
  DEEP_EP_HOST_DEVICE std::uint32_t chunk_lines() const {  ///< that there is room for
    return tagged_lines(ranges_bytes() + 2 * static_cast<std::uint32_t>(chunk()));
  }
  DEEP_EP_HOST_DEVICE std::uint32_t lines_of_chunk(int index, bool encoded) const {
    const auto width = static_cast<std::uint32_t>(chunk_width(index));
    return tagged_lines(ranges_bytes() + (encoded ? width * 10 / 8 : width * 2));
  }
  DEEP_EP_HOST_DEVICE std::uint32_t full_encoded_lines() const {
    return tagged_lines(ranges_bytes() + static_cast<std::uint32_t>(chunk()) * 10 / 8);
  }
  /// Where line 0 of a chunk lies in the row, in bytes; `beyond`: counted so, for the lines that an encoded chunk does
  /// not have. (A narrow last chunk has no more of them than a full one.)
  DEEP_EP_HOST_DEVICE std::uint32_t chunk_at(int index, bool beyond) const {
    const auto number = static_cast<std::uint32_t>(index);
    const std::uint32_t encoded = full_encoded_lines();
    if (!beyond) return number * encoded * kTaggedLine;
    const std::uint32_t behind_all = static_cast<std::uint32_t>(chunks()) * encoded;
    return (behind_all + number * (chunk_lines() - encoded) - lines_of_chunk(index, true)) * kTaggedLine;
  }
  /// Of a row that is encoded as a whole.
  DEEP_EP_HOST_DEVICE std::uint32_t encoded_bytes() const {
    return chunk_at(chunks() - 1, false) + lines_of_chunk(chunks() - 1, true) * kTaggedLine;
  }
  /// In shared memory, from one chunk of a pass to the next.
  DEEP_EP_HOST_DEVICE std::uint32_t chunk_stage_bytes() const {
    return (chunk_lines() * kTaggedPayload + 15) / 16 * 16;
  }
};

/// The part of a row's channels that one of `warps` warps sums: step by step, one vector per lane. The sums go into a
/// stage of the warp's own, from where they leave in lines.
template <bool kEncoded>
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
  DEEP_EP_DEVICE Vec16* staged(const CombineWire&, std::byte* stage, int step) const {
    return reinterpret_cast<Vec16*>(stage) + step * kVectors + lane_index();
  }
};

/// Every `warps`-th pass, in four steps.
template <>
struct WarpShare<true> {
  static constexpr int kSteps = CombineWire::kLogfmtPass / 8 / kWarpSize;
  static_assert(CombineWire::kFp8PassLines * CombineWire::kFp8LineChannels <= CombineWire::kLogfmtPass &&
                2 * CombineWire::kLogfmtPass <= CombineWire::kLogfmtPassBytes &&
                CombineWire::kFp8PassBytes % kLine == 0 && CombineWire::kLogfmtPassBytes % kLine == 0);
  int warp;
  Divisor warps;

  DEEP_EP_HOST_DEVICE int passes(const CombineWire& wire) const { return (wire.passes() - warp + warps - 1) / warps; }
  DEEP_EP_HOST_DEVICE int steps(const CombineWire& wire) const { return passes(wire) * kSteps; }
  DEEP_EP_HOST_DEVICE std::size_t stage_bytes(const CombineWire& wire) const {
    return static_cast<std::size_t>(passes(wire)) * wire.pass_bytes();
  }
  DEEP_EP_DEVICE int pass(int step) const { return warp + step / kSteps * warps; }
  DEEP_EP_DEVICE int vector(const CombineWire& wire, int step) const {
    const int of_pass = wire.pass_channels() / 8;
    const int in_pass = step % kSteps * kWarpSize + lane_index();
    const int vector = pass(step) * of_pass + in_pass;
    return in_pass < of_pass && vector < wire.vectors() ? vector : -1;
  }
  DEEP_EP_DEVICE Vec16* staged(const CombineWire& wire, std::byte* stage, int step) const {
    const int in_pass = step % kSteps * kWarpSize + lane_index();
    std::byte* begin = stage_of(wire, stage, step);
    if (wire.fp8()) return reinterpret_cast<Vec16*>(begin) + in_pass;
    const int chunk = wire.chunk() == CombineWire::kLogfmtPass ? 0 : in_pass / (CombineWire::kLogfmtPass / 16);
    begin += static_cast<std::uint32_t>(chunk) * wire.chunk_stage_bytes() + wire.ranges_bytes();
    return reinterpret_cast<Vec16*>(begin) + (in_pass - chunk * (CombineWire::kLogfmtPass / 16));
  }
  /// Of the pass that a step belongs to.
  DEEP_EP_DEVICE static std::byte* stage_of(const CombineWire& wire, std::byte* stage, int step) {
    return stage + static_cast<std::uint32_t>(step / kSteps) * wire.pass_bytes();
  }
};

/// Set in the word of a range whose chunk is encoded (magnitudes have 15 bits).
inline constexpr std::uint32_t kEncoded = 0x80000000u;

inline constexpr int kLaneChannels = 32;  ///< a lane encodes two units of neighbouring channels
inline constexpr int kGroupLanes = logfmt::kGroup / kLaneChannels;

/// Encodes the channels that begin at `from`, in place; they lie in 4 registers.
DEEP_EP_DEVICE void encode_units(const Vec16 (&channels)[4], const logfmt::Range& range, std::uint32_t* to) {
  const logfmt::Encoder encoder(range);
  for (int unit = 0; unit < 2; ++unit) {
    std::uint32_t words[logfmt::kUnitWords] = {};
#pragma unroll
    for (int i = 0; i < logfmt::kUnit; ++i) {
      const std::uint32_t pair = channels[unit * 2 + i / 8].word[i % 8 / 2];
      logfmt::pack(words, i, encoder.encode(i % 2 == 0 ? pair & 0xffffu : pair >> 16));
    }
#pragma unroll
    for (int i = 0; i < logfmt::kUnitWords; ++i) to[unit * logfmt::kUnitWords + i] = words[i];
  }
}

/// A pass of LogFMT in shared memory, of one warp.
struct PassStage {
  const CombineWire& wire;
  std::byte* memory;
  int pass;

  DEEP_EP_DEVICE int first_chunk() const { return pass * (CombineWire::kLogfmtPass / wire.chunk()); }
  DEEP_EP_DEVICE int end_chunk() const {
    const int end = (pass + 1) * (CombineWire::kLogfmtPass / wire.chunk());
    return end < wire.chunks() ? end : wire.chunks();
  }
  DEEP_EP_DEVICE std::byte* chunk(int index) const {
    return memory + static_cast<std::uint32_t>(index - first_chunk()) * wire.chunk_stage_bytes();
  }
  DEEP_EP_DEVICE std::uint32_t* ranges(int index) const { return reinterpret_cast<std::uint32_t*>(chunk(index)); }
  DEEP_EP_DEVICE bool encoded(int index) const { return (*ranges(index) & kEncoded) != 0; }
  DEEP_EP_DEVICE std::byte* channels(int index) const { return chunk(index) + wire.ranges_bytes(); }
  /// A vector's place if it is not encoded.
  DEEP_EP_DEVICE Vec16* vector(int index) const {
    const int chunk_of = index * 8 / wire.chunk();
    return reinterpret_cast<Vec16*>(channels(chunk_of)) + (index - chunk_of * wire.chunk() / 8);
  }

  /// Encodes the channels that lie in the stage wherever that pays. By a whole warp; syncs before and after.
  DEEP_EP_DEVICE void encode() const {
    warp::sync();
    const int channel = pass * CombineWire::kLogfmtPass + lane_index() * kLaneChannels;
    const std::uint32_t chunk_lanes =
        wire.chunk() == CombineWire::kLogfmtPass ? 0xffffffffu : 0xffffu << (lane_index() / 16 * 16);
    const bool mine = channel < wire.hidden;
    Vec16 values[4] = {};
    logfmt::Magnitudes magnitudes;
    if (mine) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        values[v] = vector(channel / 8)[v];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          magnitudes.include(values[v].word[i]);
          magnitudes.include(values[v].word[i] >> 16);
        }
      }
    }
    for (int mask = 1; mask < kGroupLanes; mask *= 2) {
      const std::uint32_t largest = warp::shuffle_xor(magnitudes.largest, mask);
      const std::uint32_t smallest = warp::shuffle_xor(magnitudes.smallest, mask);
      magnitudes.largest = largest > magnitudes.largest ? largest : magnitudes.largest;
      magnitudes.smallest = smallest < magnitudes.smallest ? smallest : magnitudes.smallest;
    }
    const logfmt::Range range(magnitudes);
    const bool pays = (warp::ballot(!mine || range.pays) & chunk_lanes) == chunk_lanes;
    warp::sync();  // every lane has read what another may overwrite
    if (mine) {
      const int of_chunk = channel / wire.chunk();
      const int in_chunk = channel - of_chunk * wire.chunk();
      if (in_chunk % logfmt::kGroup == 0) {
        ranges(of_chunk)[in_chunk / logfmt::kGroup] = magnitudes.packed() | (pays ? kEncoded : 0);
      }
      if (pays) {
        encode_units(
            values, range,
            reinterpret_cast<std::uint32_t*>(channels(of_chunk)) + in_chunk / logfmt::kUnit * logfmt::kUnitWords);
      }
    }
    warp::sync();
  }

  /// Adds vector `index` of what lies in the stage.
  DEEP_EP_DEVICE void add(int index, float (&sum)[8]) const;
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

DEEP_EP_DEVICE void PassStage::add(int index, float (&sum)[8]) const {
  const int of_chunk = index * 8 / wire.chunk();
  if (!encoded(of_chunk)) return add_bf16(sum, *vector(index));
  const int in_chunk = index * 8 - of_chunk * wire.chunk();
  const auto* words = reinterpret_cast<const std::uint32_t*>(channels(of_chunk)) +
                      in_chunk / logfmt::kUnit * logfmt::kUnitWords + (index & 1) * 2;
  const logfmt::Range steps(logfmt::Magnitudes::unpack(ranges(of_chunk)[in_chunk / logfmt::kGroup] & ~kEncoded));
  const int shift = (index & 1) != 0 ? 16 : 0;  // the second half of a unit begins in the middle of a word
  std::uint32_t codes[3];
  codes[0] = static_cast<std::uint32_t>((std::uint64_t{words[1]} << 32 | words[0]) >> shift);
  codes[1] = static_cast<std::uint32_t>((std::uint64_t{words[2]} << 32 | words[1]) >> shift);
  codes[2] = words[2] >> shift;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += logfmt::decode(logfmt::unpack(codes, i), steps);
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
