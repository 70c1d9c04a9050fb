// How far calls have come, in a word that only grows.
#pragma once

#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep {

/// A call's number above its position, the steps of the call that are done. So a word of a later call says that all
/// steps of the calls before are done, and words compare as numbers do.
struct Progress {
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t at(std::uint64_t call, std::uint32_t position = 0) {
    return call << 32 | position;
  }
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t call_of(std::uint64_t word) { return word >> 32; }
};

}  // namespace deep_ep
