// Places where the rows of a dispatch land, one for each token of each source, so that a sender needs to know nothing
// of the rows of others. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep {

/// The part of a rank's heap to which other ranks send rows; at the same offset on every rank. A call takes its tokens
/// through it in passes of equally many. A rank's own rows stay where they are, and only what travels beside them is
/// put here.
struct LandingWindow {
  std::uint64_t rows_at, beside_at;  ///< offsets in the heap
  std::uint32_t row_bytes;
  std::uint32_t words_beside;  ///< of a row: its scales, then its weights
  int max_tokens;              ///< of a rank
  std::int32_t first_token;    ///< of the pass, at every rank
  std::int32_t tokens;         ///< of a pass

  /// Is it a token of the pass?
  DEEP_EP_DEVICE bool holds(std::int32_t token) const { return token >= first_token && token - first_token < tokens; }
  /// Of the row that `source`, another rank, sends to `rank`.
  DEEP_EP_DEVICE std::byte* row(std::byte* heap, int source, int rank, std::int32_t token) const {
    const int part = source < rank ? source : source - 1;
    return heap + rows_at + (std::int64_t{part} * tokens + (token - first_token)) * row_bytes;
  }
  /// The number of what lies beside a row of `source`.
  DEEP_EP_DEVICE std::int64_t place_beside(int source, std::int32_t token) const {
    return std::int64_t{source} * tokens + (token - first_token);
  }
  DEEP_EP_DEVICE std::uint32_t* beside(std::byte* heap, int source, std::int32_t token) const {
    return reinterpret_cast<std::uint32_t*>(heap + beside_at) + place_beside(source, token) * words_beside;
  }
};

}  // namespace deep_ep
