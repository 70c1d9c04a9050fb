// How rows of a low-latency dispatch travel and arrive.
#pragma once
// SPDX-License-Identifier: MIT

namespace deep_ep {

/// The sender casts bfloat16 rows. A scale is for 128 channels, with nvfp4 for 16.
enum class LowLatencyFormat : int {
  bf16,             ///< as they are
  fp8,              ///< float8_e4m3 with float32 scales
  fp8_round_scale,  ///< the same; scales are powers of two
  fp8_ue8m0,        ///< the same; scales are exponents, four in an int32 from the lowest byte on
  nvfp4,            ///< e2m1 with e4m3 scales
  fp8_aligned,      ///< as fp8, with the bits of quantisers for training: true divisions, a smaller floor
};

}  // namespace deep_ep
