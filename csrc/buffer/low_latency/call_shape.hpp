// What must be equal on all ranks of a low-latency call, in a word that travels with it: those that disagree would
// misread each other.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

namespace deep_ep {

/// A hash (FNV-1a).
inline std::uint32_t call_shape_of(std::initializer_list<int> fields) {
  std::uint32_t hash = 2166136261u;
  for (const int field : fields) {
    for (int byte = 0; byte < 4; ++byte) {
      hash = (hash ^ (static_cast<std::uint32_t>(field) >> (8 * byte) & 0xffu)) * 16777619u;
    }
  }
  return hash;
}

/// Of a dispatch: below kUnknownExpertShape ten bits for what has few values, so that a message can say what
/// differs, above a hash of the rest.
struct DispatchShape {
  int format;  ///< LowLatencyFormat
  bool by_rails;
  int num_topk;
  bool too_many_tokens = false;  ///< this rank will raise: peers must hear of it

  std::uint32_t packed(std::uint32_t hash_of_rest) const;
};

/// The message about two packed shapes that differ.
std::string describe_difference(std::uint32_t ours, int rank, std::uint32_t theirs, int peer);

}  // namespace deep_ep
