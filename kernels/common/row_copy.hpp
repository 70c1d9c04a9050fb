// A warp copies a row, and its scales, selections and weights, which another rank wrote.
#pragma once

#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// Elements in the registers of a warp, so that loads of several of a lane are under way at once.
template <class Element, int kTogether>
struct WarpPiece {
  static constexpr int kElements = kTogether * kWarpSize;

  Element of_lane[kTogether];

  /// By a lane: `work(element, index)` for each of its elements. The piece begins at index `first`; there is nothing
  /// from `end` on.
  template <class Work>
  DEEP_EP_DEVICE void each(int first, int end, Work work) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = first + lane_index() + i * kWarpSize;
      if (at < end) work(of_lane[i], at);
    }
  }
};

/// By a whole warp: copies `bytes` bytes, a multiple of the element's.
template <class Element>
DEEP_EP_DEVICE void copy_elements(void* to, const void* from, std::uint32_t bytes) {
  const int elements = static_cast<int>(bytes / sizeof(Element));
  WarpPiece<Element, 4> piece;
#pragma unroll 1
  for (int first = 0; first < elements; first += piece.kElements) {
    piece.each(first, elements, [=](Element& e, int at) { e = load_weak(static_cast<const Element*>(from) + at); });
    piece.each(first, elements, [=](const Element& e, int at) { static_cast<Element*>(to)[at] = e; });
  }
}
/// A row: a multiple of 16 bytes.
DEEP_EP_DEVICE void copy_row(void* to, const void* from, std::uint32_t bytes) { copy_elements<Vec16>(to, from, bytes); }
/// Scales, selections and weights of a row: a multiple of 4 bytes.
DEEP_EP_DEVICE void copy_words(void* to, const void* from, std::uint32_t bytes) {
  copy_elements<std::uint32_t>(to, from, bytes);
}

}  // namespace deep_ep::device
