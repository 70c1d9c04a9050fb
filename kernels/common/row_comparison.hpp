// Do two ranks mean the same call, and rows of the same kind?
#pragma once

#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

/// The first of some words that must be equal in which two ranks differ.
struct Difference {
  int at = -1;  ///< negative: they agree
  std::uint64_t ours = 0, theirs = 0;
};

template <class Word, int kWords>
DEEP_EP_DEVICE Difference difference(const Word (&ours)[kWords], const Word (&theirs)[kWords]) {
  Difference found;
#pragma unroll
  for (int i = kWords - 1; i >= 0; --i) {
    if (ours[i] == theirs[i]) continue;
    found = {i, static_cast<std::uint64_t>(ours[i]), static_cast<std::uint64_t>(theirs[i])};
  }
  return found;
}

}  // namespace deep_ep::device
