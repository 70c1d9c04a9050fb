// A warp copies a row, and its scales, selections and weights, which another rank wrote.
#pragma once

#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// By a whole warp: copies `bytes` bytes, a multiple of the element's. Loads of several elements of a lane are under
/// way at once.
template <class Element>
DEEP_EP_DEVICE void copy_elements(void* to, const void* from, std::uint32_t bytes) {
  constexpr int kTogether = 4;
  const auto* source = static_cast<const Element*>(from);
  auto* target = static_cast<Element*>(to);
  const int elements = static_cast<int>(bytes / sizeof(Element));
#pragma unroll 1
  for (int begin = lane_index(); begin < elements; begin += kTogether * kWarpSize) {
    Element loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (begin + i * kWarpSize < elements) loaded[i] = load_weak(source + begin + i * kWarpSize);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (begin + i * kWarpSize < elements) target[begin + i * kWarpSize] = loaded[i];
    }
  }
}
/// A row: a multiple of 16 bytes.
DEEP_EP_DEVICE void copy_row(void* to, const void* from, std::uint32_t bytes) { copy_elements<Vec16>(to, from, bytes); }
/// Scales, selections and weights of a row: a multiple of 4 bytes.
DEEP_EP_DEVICE void copy_words(void* to, const void* from, std::uint32_t bytes) {
  copy_elements<std::uint32_t>(to, from, bytes);
}

}  // namespace deep_ep::device
