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
#pragma unroll
    for (int i = 0; i < logfmt::kUnit; ++i) {
      const std::uint32_t pair = channels[unit * 2 + i / 8].word[i % 8 / 2];
      logfmt::pack(words, i, encoder.encode(i % 2 == 0 ? pair & 0xffffu : pair >> 16));
    }
#pragma unroll
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
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        channels[v] = from[v];
#pragma unroll
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
    if (channel % logfmt::kGroup == 0)
      ranges[channel / logfmt::kGroup] = magnitudes.packed() | (encoded ? kEncoded : 0);
    if (encoded) {
      std::byte* chunk_begin = stage + wire.chunk_at(channel / chunk);
      encode_units(
          channels, range,
          reinterpret_cast<std::uint32_t*>(chunk_begin) + channel % chunk / logfmt::kUnit * logfmt::kUnitWords);
    }
  }
}

/// Where vector `vector` of a received row is.
struct VectorPlace {
  std::uint32_t range;    ///< offset of its group's range
  std::uint32_t plain;    ///< offset of its 16 bytes, unencoded
  std::uint32_t encoded;  ///< offset of the three words with its codes
  bool second_half;       ///< of its unit: the codes begin in the middle of the first word

  DEEP_EP_DEVICE VectorPlace(const CombineWire& wire, int vector)
      : range(static_cast<std::uint32_t>(vector * 8 / logfmt::kGroup) * 4),
        plain(wire.ranges_bytes() + static_cast<std::uint32_t>(vector) * 16),
        second_half((vector & 1) != 0) {
    const int chunk = vector * 8 / wire.chunk();
    const int unit = (vector * 8 - chunk * wire.chunk()) / logfmt::kUnit;
    encoded = wire.chunk_at(chunk) + static_cast<std::uint32_t>(unit * logfmt::kUnitWords + (vector & 1) * 2) * 4;
  }
};

/// The range word of the vector's group, to be loaded first.
DEEP_EP_DEVICE std::uint32_t load_range(const std::byte* row, const VectorPlace& place) {
  return load_weak(reinterpret_cast<const std::uint32_t*>(row + place.range));
}

/// Its bytes: 16, or where its chunk is encoded, the words with its codes.
DEEP_EP_DEVICE Vec16 load_channels(const std::byte* row, const VectorPlace& place, std::uint32_t range) {
  if ((range & kEncoded) == 0) return load_weak(reinterpret_cast<const Vec16*>(row + place.plain));
  Vec16 loaded{};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    loaded.word[i] = load_weak(reinterpret_cast<const std::uint32_t*>(row + place.encoded) + i);
  }
  return loaded;
}

DEEP_EP_DEVICE void add_bf16(float (&sum)[8], const Vec16& vector) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_low(vector.word[i]);
    sum[2 * i + 1] += bf16_high(vector.word[i]);
  }
}

/// Adds what load_channels loaded.
DEEP_EP_DEVICE void add_channels(float (&sum)[8], const Vec16& loaded, const VectorPlace& place, std::uint32_t range) {
  if ((range & kEncoded) == 0) return add_bf16(sum, loaded);
  const logfmt::Range steps(logfmt::Magnitudes::unpack(range & ~kEncoded));
  const int shift = place.second_half ? 16 : 0;
  std::uint32_t codes[3];
  codes[0] = static_cast<std::uint32_t>((std::uint64_t{loaded.word[1]} << 32 | loaded.word[0]) >> shift);
  codes[1] = static_cast<std::uint32_t>((std::uint64_t{loaded.word[2]} << 32 | loaded.word[1]) >> shift);
  codes[2] = loaded.word[2] >> shift;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += logfmt::decode(logfmt::unpack(codes, i), steps);
}

DEEP_EP_DEVICE Vec16 pack_sum(const float (&sum)[8]) {
  Vec16 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.word[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  return packed;
}

}  // namespace device::low_latency
}  // namespace deep_ep
