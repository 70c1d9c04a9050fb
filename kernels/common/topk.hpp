// What tokens select: top-k indices as callers give and get them, and the experts that they name.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/primitives/memory.hpp"

namespace deep_ep {

/// The expert that an index names; -1 for a negative index, which selects nothing, and for one beyond the experts.
DEEP_EP_HOST_DEVICE constexpr int expert_of(std::int64_t index, int num_experts) {
  return index >= 0 && index < num_experts ? static_cast<int>(index) : -1;
}

/// A caller's table [tokens, num_topk] of 32-bit or 64-bit indices. Plain data, set by the host.
struct TopkIndices {
  const void* data = nullptr;  ///< nullptr: there is none
  bool is_64_bit = false;

  /// Index number `at`, as the caller gave it: in two steps, as a thread may not need it before others are loading. For
  /// tables that are read once.
  struct Words {
    std::uint32_t low = ~0u, high = ~0u;  ///< of no selection
  };
  DEEP_EP_DEVICE Words load_words(std::int64_t at) const {
    const auto* const words = static_cast<const std::uint32_t*>(data) + (is_64_bit ? 2 * at : at);
    return {device::load_stream(words), is_64_bit ? device::load_stream(words + 1) : 0};
  }
  DEEP_EP_DEVICE std::int64_t index_of(const Words& words) const {
    return is_64_bit ? static_cast<std::int64_t>(std::uint64_t{words.high} << 32 | words.low)
                     : static_cast<std::int32_t>(words.low);
  }
  /// The same for a thread that reads neighbouring indices one after the other, which its cache serves.
  DEEP_EP_DEVICE std::int64_t load_cached(std::int64_t at) const {
    return is_64_bit ? static_cast<const std::int64_t*>(data)[at] : static_cast<const std::int32_t*>(data)[at];
  }
};

DEEP_EP_DEVICE void store_topk_index(std::byte* table, bool is_64_bit, std::int64_t at, std::int64_t index) {
  if (is_64_bit) {
    reinterpret_cast<std::int64_t*>(table)[at] = index;
  } else {
    reinterpret_cast<std::int32_t*>(table)[at] = static_cast<std::int32_t>(index);
  }
}

}  // namespace deep_ep
