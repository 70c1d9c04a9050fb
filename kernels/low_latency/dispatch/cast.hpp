// A token's row on its way into the stage: cast to FP8 in registers, or copied.
#pragma once

#include "kernels/common/fp8_cast.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

/// The row of one token. The whole block takes part; each thread handles eight channels (a vector) at a time.
template <bool kExtra>
struct RowWriter {
  const LowLatencyDispatchParams& params;
  LowLatencyRowOf<kExtra> row;
  const Vec16* x;             ///< the token's row as the caller gave it
  std::byte* stage;           ///< where it is written as it will travel
  float global_scale = 1.0f;  ///< of nvfp4

  static constexpr int kVectorChannels = 8;
  static constexpr int kScaleLanes = kScaleChannels / kVectorChannels;

  DEEP_EP_DEVICE int vectors() const { return params.hidden / kVectorChannels; }

  DEEP_EP_DEVICE Vec16 load(int vector) const { return vector < vectors() ? load_stream(x + vector) : Vec16{}; }

  /// `first` is what load(thread_index()) returned: so that load can start early.
  DEEP_EP_DEVICE void write(Vec16 first) const {
    Fp8Scale of_token{};
    if constexpr (kExtra) {
      if (row.of_token) of_token = scale_of_token(first);
    }
    // Whole warps stay in the loop: lanes compare their channels.
#pragma unroll 1
    for (int base = thread_index() - lane_index(); base < vectors(); base += block_threads()) {
      const int vector = base + lane_index();
      const Vec16 next = load(vector + block_threads());
      if (kExtra && write_extra(vector, first, of_token)) {
        // It was one that plain kernels do not make.
      } else if (row.scaled) {
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
  /// False: the row is one that plain kernels make.
  DEEP_EP_DEVICE bool write_extra(int vector, const Vec16& value, const Fp8Scale& of_token) const {
    if (row.of_token) store_fp8<true>(vector, value, of_token);
    if (row.nvfp4) write_nvfp4(vector, value);
    return row.of_token || row.nvfp4;
  }

  DEEP_EP_DEVICE void write_fp8(int vector, const Vec16& value) const {
    const std::uint32_t amax = largest_of_lanes<kScaleLanes>(largest_magnitude(value));
    const Fp8Scale scale = fp8_scale(bf16_low(amax), params.format != LowLatencyFormat::fp8);
    store_fp8<false>(vector, value, scale);
  }

  /// kOfToken: the row has no other scale.
  template <bool kOfToken>
  DEEP_EP_DEVICE void store_fp8(int vector, const Vec16& value, const Fp8Scale& scale) const {
    if (vector >= vectors()) return;
    reinterpret_cast<std::uint64_t*>(stage + row.payload_at())[vector] = to_e4m3(value, scale.multiplier);
    if (kOfToken ? vector == 0 : vector % kScaleLanes == 0) {
      reinterpret_cast<float*>(stage + row.scales_at())[vector / kScaleLanes] = scale.inverse;
    }
  }

  /// By the whole block: the row is gone through once more before it is cast. The payload's place serves to exchange
  /// what the warps have found.
  DEEP_EP_DEVICE Fp8Scale scale_of_token(Vec16 value) const {
    std::uint32_t amax = 0;
#pragma unroll 1
    for (int vector = thread_index(); vector < vectors(); vector += block_threads()) {
      if (vector != thread_index()) value = load(vector);
      const std::uint32_t next = largest_magnitude(value);
      amax = next > amax ? next : amax;
    }
    amax = largest_of_lanes<kWarpSize>(amax);
    auto* const found = reinterpret_cast<std::uint32_t*>(stage + row.payload_at());
    if (lane_index() == 0) found[warp_index()] = amax;
    block::sync();
    for (int warp = 0; warp < block_warps(); ++warp) amax = found[warp] > amax ? found[warp] : amax;
    block::sync();
    return fp8_scale(bf16_low(amax), params.format == LowLatencyFormat::fp8_token_round_scale);
  }

  DEEP_EP_DEVICE void write_nvfp4(int vector, const Vec16& value) const {
    constexpr int kLanes = kNvfp4ScaleChannels / kVectorChannels;
    const std::uint32_t amax = largest_of_lanes<kLanes>(largest_magnitude(value));
    if (vector >= vectors()) return;
    const Nvfp4Scale scale = nvfp4_scale(bf16_low(amax), global_scale);
    std::uint32_t codes = 0;
    for (int i = 0; i < 4; ++i) {
      codes |= e2m1(bf16_low(value.word[i]) * scale.multiplier) << (8 * i);
      codes |= e2m1(bf16_high(value.word[i]) * scale.multiplier) << (8 * i + 4);
    }
    reinterpret_cast<std::uint32_t*>(stage + row.payload_at())[vector] = codes;
    if (vector % kLanes == 0) stage[row.scales_at() + vector / kLanes] = static_cast<std::byte>(scale.e4m3);
  }
};

}  // namespace deep_ep::device::low_latency
