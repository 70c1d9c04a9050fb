// Polling for rows that arrive in tagged lines (primitives/line.hpp).
#pragma once

#include "kernels/primitives/line.hpp"

namespace deep_ep::device {

/// Pieces of rows that a warp polls into its registers. A piece is up to kWarpLines lines, of which each lane has its
/// part; pieces may belong to one row or to several.
template <int kPieces>
struct LinePoller {
  LinePart part[kPieces];
  std::uint32_t missing = (1u << kPieces) - 1;  ///< bit i: piece i is not there

  /// By a whole warp: loads what is missing. `tag(i)` is the tag of piece i, `from(i)` where the lane's part of it
  /// lies, `is_line(i)` whether there is such a line. If not `thorough`, looks at the first of them only, and at the
  /// others when that has come: polls of all warps together would slow down what they wait for. True when none is
  /// missing.
  template <class Tag, class From, class IsLine>
  DEEP_EP_DEVICE bool poll(bool thorough, Tag tag, From from, IsLine is_line) {
    std::uint32_t polled = thorough ? missing : missing & (~missing + 1);
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((polled >> i & 1u) != 0) part[i] = load_line(from(i), is_line(i));
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((polled >> i & 1u) != 0 && all_tagged(part[i], tag(i), is_line(i))) missing &= ~(1u << i);
      }
      if (missing == 0) return true;
      if ((polled & missing) != 0) return false;
      polled = missing;
    }
  }
};

}  // namespace deep_ep::device
