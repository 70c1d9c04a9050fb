// A kernel that measures what a row costs the warp that posts it: entry, doorbell, poll.
#pragma once

#include "kernels/common/faults.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::test {

/// One warp; each round posts kRows puts, rings once, and polls until they are complete. Nobody executes them: the
/// completion entry is written by the warp itself, outside of what is timed.
struct RingCostParams {
  static constexpr int kRows = 32;
  static constexpr std::uint32_t kRowBytes = 7936;

  RdmaPeerParams peer;
  device::rdma::CompletionEntry* completion = nullptr;  ///< the one of `peer`
  int rounds = 0;
  bool one_thread = false;         ///< lane 0 posts alone, not the warp together
  std::int64_t* cycles = nullptr;  ///< [3]: writing entries, ringing, polling; of all rounds
  WaitContext wait;
};

}  // namespace deep_ep::test

DEEP_EP_DECLARE_KERNEL(ring_cost, deep_ep::test::RingCostParams, 32)
