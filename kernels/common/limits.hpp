// Limits and alignments that host code and all families of kernels share.
#pragma once

#include <cstddef>
#include <type_traits>

#include "kernels/primitives/target.hpp"

namespace deep_ep {

constexpr int kMaxRanks = 1024;     ///< tables that kernels and the host share have a place for each
constexpr int kMaxTopk = 32;        ///< the lanes of a warp hold a token's selections
constexpr std::size_t kLine = 128;  ///< rows and words that different ranks write never share a line

template <class T>
DEEP_EP_HOST_DEVICE constexpr T align_up(T value, std::type_identity_t<T> alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
DEEP_EP_HOST_DEVICE constexpr std::size_t align_to_line(std::size_t bytes) { return align_up(bytes, kLine); }

}  // namespace deep_ep
