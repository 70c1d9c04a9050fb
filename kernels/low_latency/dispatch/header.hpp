// Reading the header of a row of dispatch out of its lines, for whoever receives the row or hands it on.
#pragma once

#include "kernels/low_latency/params.hpp"

namespace deep_ep::device::low_latency {

// A warp has the header in the lines that it loads at once: the token, and expert, weight and slot of each selection.
static_assert(sizeof(std::uint32_t) * (1 + 3 * kMaxTopk) <= kWarpLines * kTaggedPayload);

/// Word `word` of the header, of whose lines each lane has a part; another one in every lane. By a whole warp.
DEEP_EP_DEVICE std::uint32_t header_word(const LinePart& head, int word) {
  const std::uint32_t at = 4 * static_cast<std::uint32_t>(word);
  const std::uint32_t in_line = at % kTaggedPayload;
  const int holder = static_cast<int>(at / kTaggedPayload * kLineLanes + in_line / 16);
  const std::uint64_t low = warp::shuffle(head.word[0], holder);
  const std::uint64_t high = warp::shuffle(head.word[1], holder);
  const std::uint64_t both = in_line % 16 < 8 ? low : high;
  return static_cast<std::uint32_t>(at % 8 == 0 ? both : both >> 32);
}

}  // namespace deep_ep::device::low_latency
