// What whoever gets a row of dispatch, to receive it or to hand it on, needs to read it.
#pragma once

#include "kernels/low_latency/dispatch/send.hpp"

namespace deep_ep::device {

// A warp has the header in the lines that it loads at once: the token, and expert, weight and slot of each selection.
static_assert(sizeof(std::uint32_t) * (1 + 3 * LowLatencyWindow::kMostTopk) <= kWarpLines * kTaggedPayload);

/// By RDMA the pieces of a line come in any order, tag or not. Waits, as a whole warp, until row `slot` is there.
DEEP_EP_DEVICE bool await_far_row(const LowLatencyParams& common, std::uint64_t epoch, int source, int slot) {
  const std::uint64_t expected = progress_value(epoch, slot + 1);
  const std::uint64_t* progress = progress_word(common, kDispatch, epoch, source);
  return wait_for_peer<Waiting::whole_warp>(common, source, Wanted::low_latency_dispatch_rows, expected,
                                            [&](std::uint64_t& seen) {
                                              seen = load_acquire<Scope::system>(progress);
                                              return warp::all(seen >= expected);
                                            });
}

/// Word `word` of the header, of whose lines each lane has a part; another one in every lane.
DEEP_EP_DEVICE std::uint32_t header_word(const LinePart& head, int word) {
  const std::uint32_t at = 4 * static_cast<std::uint32_t>(word);
  const std::uint32_t in_line = at % kTaggedPayload;
  const int holder = static_cast<int>(at / kTaggedPayload * kLineLanes + in_line / 16);
  const std::uint64_t low = warp::shuffle(head.word[0], holder);
  const std::uint64_t high = warp::shuffle(head.word[1], holder);
  const std::uint64_t both = in_line % 16 < 8 ? low : high;
  return static_cast<std::uint32_t>(at % 8 == 0 ? both : both >> 32);
}

}  // namespace deep_ep::device
