// A row of combine as it travels from an expert rank to the token's owner: bfloat16, or with LogFMT a range for each
// group of channels and then the chunks, each encoded or not, at the place where it begins unencoded. So nobody needs
// to know how long the others became, and a row is encoded where it lies.
#pragma once

#include "kernels/low_latency/logfmt.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep {

struct CombineWire {
  int hidden;
  bool logfmt;

  DEEP_EP_HOST_DEVICE int vectors() const { return hidden / 8; }  ///< of 16 bytes, unencoded
  DEEP_EP_HOST_DEVICE std::uint32_t ranges_bytes() const {
    return logfmt ? (static_cast<std::uint32_t>(hidden) / device::logfmt::kGroup * 4 + 15) / 16 * 16 : 0;
  }
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return ranges_bytes() + 2 * static_cast<std::uint32_t>(hidden); }

  DEEP_EP_HOST_DEVICE int chunk() const { return device::logfmt::chunk_channels(hidden); }
  DEEP_EP_HOST_DEVICE int chunks() const { return (hidden + chunk() - 1) / chunk(); }
  DEEP_EP_HOST_DEVICE std::uint32_t chunk_at(int index) const {
    return ranges_bytes() + 2 * static_cast<std::uint32_t>(index * chunk());
  }
  DEEP_EP_HOST_DEVICE int chunk_width(int index) const {
    return hidden - index * chunk() < chunk() ? hidden - index * chunk() : chunk();
  }
};

namespace device::low_latency {

/// Set in the word of a range whose chunk is encoded (magnitudes have 15 bits).
inline constexpr std::uint32_t kEncoded = 0x80000000u;

inline constexpr int kLaneChannels = 32;  ///< a lane encodes two units of neighbouring channels ...
inline constexpr int kGroupLanes = logfmt::kGroup / kLaneChannels;
inline constexpr int kPassChannels = kWarpSize * kLaneChannels;  ///< ... and a warp one chunk, or two small ones

/// Encodes the channels that begin at `from`, in place; they lie in 4 registers.
DEEP_EP_DEVICE void encode_units(const Vec16 (&channels)[4], const logfmt::Range& range, std::uint32_t* to) {
  const logfmt::Encoder encoder(range);
  for (int unit = 0; unit < 2; ++unit) {
    std::uint32_t words[logfmt::kUnitWords] = {};
    for (int i = 0; i < logfmt::kUnit; ++i) {
      const std::uint32_t pair = channels[unit * 2 + i / 8].word[i % 8 / 2];
      logfmt::pack(words, i, encoder.encode(i % 2 == 0 ? pair & 0xffffu : pair >> 16));
    }
    for (int i = 0; i < logfmt::kUnitWords; ++i) to[unit * logfmt::kUnitWords + i] = words[i];
  }
}

/// Encodes the row in `stage`, whose channels lie behind the room for the ranges, wherever that pays. Warp `warp` of
/// `warps` does its part; the writers of the channels have been met before, the readers of the result come after.
DEEP_EP_DEVICE void encode_row(const CombineWire& wire, std::byte* stage, int warp, int warps) {
  auto* ranges = reinterpret_cast<std::uint32_t*>(stage);
  const int chunk = wire.chunk();
  const std::uint32_t chunk_lanes = chunk == kPassChannels ? 0xffffffffu : 0xffffu << (lane_index() / 16 * 16);
  for (int pass = warp; pass * kPassChannels < wire.hidden; pass += warps) {
    const int channel = pass * kPassChannels + lane_index() * kLaneChannels;
    const bool mine = channel < wire.hidden;
    Vec16 channels[4] = {};
    logfmt::Magnitudes magnitudes;
    if (mine) {
      const auto* from = reinterpret_cast<const Vec16*>(stage + wire.ranges_bytes() + 2 * channel);
      for (int v = 0; v < 4; ++v) {
        channels[v] = from[v];
        for (int i = 0; i < 4; ++i) {
          magnitudes.include(channels[v].word[i]);
          magnitudes.include(channels[v].word[i] >> 16);
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
    const bool encoded = (warp::ballot(!mine || range.pays) & chunk_lanes) == chunk_lanes;
    warp::sync();  // every lane has read what another may overwrite
    if (!mine) continue;
    if (channel % logfmt::kGroup == 0) ranges[channel / logfmt::kGroup] = magnitudes.packed() | (encoded ? kEncoded : 0);
    if (encoded) {
      std::byte* chunk_begin = stage + wire.chunk_at(channel / chunk);
      encode_units(channels, range,
                   reinterpret_cast<std::uint32_t*>(chunk_begin) + channel % chunk / logfmt::kUnit * logfmt::kUnitWords);
    }
  }
}

/// Vector `vector` of a received row: the range word of its group, to be loaded first.
DEEP_EP_DEVICE std::uint32_t load_range(const std::byte* row, int vector) {
  return load_weak(reinterpret_cast<const std::uint32_t*>(row) + vector * 8 / logfmt::kGroup);
}

/// Its bytes: 16, or where its chunk is encoded, the ten that hold its codes.
DEEP_EP_DEVICE Vec16 load_channels(const CombineWire& wire, const std::byte* row, int vector, std::uint32_t range) {
  if ((range & kEncoded) == 0) return load_weak(reinterpret_cast<const Vec16*>(row + wire.ranges_bytes()) + vector);
  const int chunk = vector * 8 / wire.chunk();
  const int unit = (vector * 8 - chunk * wire.chunk()) / logfmt::kUnit;
  const int half = vector & 1;
  const auto* words = reinterpret_cast<const std::uint32_t*>(row + wire.chunk_at(chunk)) + unit * logfmt::kUnitWords;
  Vec16 loaded;
  for (int i = 0; i < 3; ++i) loaded.word[i] = load_weak(words + 2 * half + i);
  if (half != 0) {  // the second half begins in the middle of a word
    loaded.word[0] = loaded.word[0] >> 16 | loaded.word[1] << 16;
    loaded.word[1] = loaded.word[1] >> 16 | loaded.word[2] << 16;
    loaded.word[2] = loaded.word[2] >> 16;
  }
  return loaded;
}

DEEP_EP_DEVICE void add_bf16(float (&sum)[8], const Vec16& vector) {
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_low(vector.word[i]);
    sum[2 * i + 1] += bf16_high(vector.word[i]);
  }
}

/// Adds what load_channels loaded.
DEEP_EP_DEVICE void add_channels(float (&sum)[8], const Vec16& loaded, std::uint32_t range_word) {
  if ((range_word & kEncoded) == 0) return add_bf16(sum, loaded);
  const logfmt::Range range(logfmt::Magnitudes::unpack(range_word & ~kEncoded));
  for (int i = 0; i < 8; ++i) sum[i] += logfmt::decode(logfmt::unpack(loaded.word, i), range);
}

DEEP_EP_DEVICE Vec16 pack_sum(const float (&sum)[8]) {
  Vec16 packed;
  for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  return packed;
}

}  // namespace device::low_latency
}  // namespace deep_ep
