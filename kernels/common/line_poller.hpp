// Polling for rows that arrive in tagged lines (primitives/line.hpp).
#pragma once

#include <type_traits>

#include "kernels/primitives/line.hpp"

namespace deep_ep::device {

/// The tag of piece `i`: all have the same one, or `tag(i)` says.
template <class Tag>
DEEP_EP_DEVICE std::uint64_t tag_of_piece(const Tag& tag, int i) {
  if constexpr (std::is_invocable_v<Tag, int>) {
    return tag(i);
  } else {
    return tag;
  }
}

/// Pieces of rows that a warp polls into its registers. A piece is up to kWarpLines lines, of which each lane has its
/// part; pieces may belong to one row or to several.
template <int kPieces>
struct LinePoller {
  static constexpr std::uint32_t kAll = (1u << kPieces) - 1;

  LinePart part[kPieces];
  std::uint32_t missing = kAll;  ///< bit i: piece i is not there

  /// By a whole warp: loads what is missing of the pieces `open`, a bit each. `from(i)` is where the lane's part of
  /// piece i lies, `is_line(i)` whether there is such a line. If not `thorough`, looks at the first of them only, and
  /// at the others when that has come: polls of all warps together would slow down what they wait for. True when none
  /// of them is missing.
  template <class Tag, class From, class IsLine>
  DEEP_EP_DEVICE bool poll(std::uint32_t open, bool thorough, const Tag& tag, From from, IsLine is_line) {
    open &= missing;
    std::uint32_t polled = thorough ? open : open & (~open + 1);
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((polled >> i & 1u) != 0) part[i] = load_line(from(i), is_line(i));
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((polled >> i & 1u) != 0 && all_tagged(part[i], tag_of_piece(tag, i), is_line(i))) missing &= ~(1u << i);
      }
      open &= missing;
      if (open == 0) return true;
      if ((polled & open) != 0) return false;
      polled = open;
    }
  }
};

}  // namespace deep_ep::device
