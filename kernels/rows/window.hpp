// Places for rows of tokens in a part of each rank's heap, so that a sender needs to know nothing of the rows of
// others. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

/// The part of a rank's heap to which other ranks send rows of tokens, theirs or its own; at the same offset on every
/// rank. A call takes the tokens of a rank through it in passes of equally many.
struct TokenWindow {
  std::uint64_t rows_at, beside_at;  ///< offsets in the heap
  std::uint32_t row_stride;
  /// Of a token and rank. Dispatch: its scales, then its weights. Combine: its weights, or the set of its selections.
  std::uint32_t words_beside;
  Divisor max_tokens;        ///< of a rank
  std::int32_t first_token;  ///< of the pass, at every rank
  std::int32_t tokens;       ///< of a pass
  int parts;                 ///< rows that each slot has room for, a part of the window each

  DEEP_EP_DEVICE std::int32_t slot_of(std::int32_t token) const { return token - first_token; }
  DEEP_EP_DEVICE bool holds(std::int32_t token) const { return token >= first_token && slot_of(token) < tokens; }
  /// Of `all` tokens of a rank, those in the pass.
  DEEP_EP_DEVICE std::int32_t tokens_of(std::int32_t all) const {
    const std::int32_t rest = all - first_token;
    return rest < 0 ? 0 : rest < tokens ? rest : tokens;
  }
  DEEP_EP_DEVICE std::byte* row(std::byte* heap, int part, std::int32_t slot) const {
    return heap + rows_at + (std::int64_t{part} * tokens + slot) * row_stride;
  }
  /// The number of what lies beside the rows of a token and rank.
  DEEP_EP_DEVICE std::int64_t place_beside(int rank, std::int32_t slot) const {
    return std::int64_t{rank} * tokens + slot;
  }
  DEEP_EP_DEVICE std::uint32_t* beside(std::byte* heap, int rank, std::int32_t slot) const {
    return reinterpret_cast<std::uint32_t*>(heap + beside_at) + place_beside(rank, slot) * words_beside;
  }
};

/// Of a dispatch: the part of the rows that `source`, another rank, sends to `rank`. A rank's own rows stay where they
/// are, and only what travels beside them is put into its window.
DEEP_EP_DEVICE int landing_part(int source, int rank) { return source < rank ? source : source - 1; }

}  // namespace deep_ep
