// What ranks compare to find out that they mean the same low-latency call.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace deep_ep {

/// A hash (FNV-1a) of what must be equal on all ranks: those that disagree would misread each other.
inline std::uint32_t call_shape_of(std::initializer_list<int> fields) {
  std::uint32_t hash = 2166136261u;
  for (const int field : fields) {
    for (int byte = 0; byte < 4; ++byte) {
      hash = (hash ^ (static_cast<std::uint32_t>(field) >> (8 * byte) & 0xffu)) * 16777619u;
    }
  }
  return hash;
}

}  // namespace deep_ep
