// A token's row on its way into the stage: cast to FP8 in registers, or copied.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

/// The row of one token. The whole block takes part; each thread handles eight channels (a vector) at a time.
struct RowWriter {
  const LowLatencyDispatchParams& params;
  LowLatencyRow row;
  const Vec16* x;    ///< the token's row as the caller gave it
  std::byte* stage;  ///< where it is written as it will travel

  static constexpr int kVectorChannels = 8;
  static constexpr int kScaleLanes = kScaleChannels / kVectorChannels;

  DEEP_EP_DEVICE int vectors() const { return params.hidden / kVectorChannels; }

  DEEP_EP_DEVICE Vec16 load(int vector) const { return vector < vectors() ? load_stream(x + vector) : Vec16{}; }

  /// `first` is what load(thread_index()) returned: so that load can start early.
  DEEP_EP_DEVICE void write(Vec16 first) const {
    // Whole warps stay in the loop: lanes compare their channels.
#pragma unroll 1
    for (int base = thread_index() - lane_index(); base < vectors(); base += block_threads()) {
      const int vector = base + lane_index();
      const Vec16 next = load(vector + block_threads());
      if (row.fp8) {
        write_fp8(vector, first);
      } else if (vector < vectors()) {
        auto* words = reinterpret_cast<std::uint64_t*>(stage + row.payload_at()) + 2 * vector;  // aligned to 8 only
        words[0] = std::uint64_t{first.word[1]} << 32 | first.word[0];
        words[1] = std::uint64_t{first.word[3]} << 32 | first.word[2];
      }
      first = next;
    }
  }

 private:
  DEEP_EP_DEVICE void write_fp8(int vector, const Vec16& value) const {
    // Magnitudes of bfloat16 numbers have the same order as their bits.
    std::uint32_t amax = 0;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t low = value.word[i] & 0x7fffu;
      const std::uint32_t high = value.word[i] >> 16 & 0x7fffu;
      amax = low > amax ? low : amax;
      amax = high > amax ? high : amax;
    }
    for (int distance = kScaleLanes / 2; distance > 0; distance /= 2) {
      const std::uint32_t other = warp::shuffle_xor(amax, distance);
      amax = other > amax ? other : amax;
    }
    const Fp8Scale scale = fp8_scale(bf16_low(amax), params.format != LowLatencyFormat::fp8);
    if (vector >= vectors()) return;
    std::uint32_t words[2];
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t a = value.word[2 * i];
      const std::uint32_t b = value.word[2 * i + 1];
      words[i] =
          static_cast<std::uint32_t>(pack_e4m3(bf16_low(a) * scale.multiplier, bf16_high(a) * scale.multiplier)) |
          static_cast<std::uint32_t>(pack_e4m3(bf16_low(b) * scale.multiplier, bf16_high(b) * scale.multiplier)) << 16;
    }
    reinterpret_cast<std::uint64_t*>(stage + row.payload_at())[vector] =
        static_cast<std::uint64_t>(words[1]) << 32 | words[0];
    if (vector % kScaleLanes == 0) {
      reinterpret_cast<float*>(stage + row.scales_at())[vector / kScaleLanes] = scale.inverse;
    }
  }
};

}  // namespace deep_ep::device::low_latency
