// Waiting for a peer in low-latency calls. A peer that does not come within the deadline is a fault, as everywhere; or,
// where the buffer masks ranks, it is masked, and the call goes on without it.
#pragma once

#include "kernels/common/faults.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/cell.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// True for a rank that is left out: nothing is sent to it, nothing is expected of it.
DEEP_EP_DEVICE bool masked(const LowLatencyParams& common, int peer) {
  return common.mask != nullptr && load_relaxed<Scope::gpu>(common.mask + peer) != 0;
}

/// Leaves `peer` out from now on, and tells the host. The version moves on both before and after: whoever begins in
/// between has seen an old one, and whoever has seen the mask finds a new one (masks.hpp).
DEEP_EP_DEVICE void mask_rank(const LowLatencyParams& common, int peer, Wanted wanted, std::uint64_t expected,
                              std::uint64_t seen) {
  write_record(common.masked[peer], FaultKind::timeout, wanted, peer, 0, expected, seen);
  add_relaxed<Scope::gpu>(&common.state->mask_version, std::uint64_t{1});
  store_release<Scope::gpu>(common.mask + peer, 1);
  add_release<Scope::gpu>(&common.state->mask_version, std::uint64_t{1});
}

/// Masks a rank that is late, or ends the call.
DEEP_EP_DEVICE void blame(const LowLatencyParams& common, int peer, Wanted wanted, std::uint64_t expected,
                          std::uint64_t seen) {
  if (common.mask != nullptr) {
    mask_rank(common, peer, wanted, expected, seen);
  } else {
    report_fault(common.wait, FaultKind::timeout, wanted, peer, 0, expected, seen);
  }
}

enum class Waiting { one_thread, whole_warp };

/// Polls until `arrived(seen)` is true, where it sets `seen` to what a message may show. False when `peer` is masked,
/// be it by this wait once `is_late(begin)` is true, or when the call was aborted: what was waited for must not be
/// touched then. The lanes of a whole warp leave together: for them `arrived` is the same.
template <Waiting kWaiting, class Arrived, class IsLate>
DEEP_EP_DEVICE bool poll_peer(const LowLatencyParams& common, int peer, Wanted wanted, std::uint64_t expected,
                              Arrived arrived, IsLate is_late) {
  std::uint64_t seen = 0;
  std::uint64_t begin = 0;
  for (int spins = 0;; ++spins) {
    if (arrived(seen)) return true;
    if (spins == 0) begin = now_ns();
    pause(spins);
    if (spins % 64 != 63) continue;  // polling must stay cheap
    bool over = false;
    if (kWaiting == Waiting::one_thread || lane_index() == 0) {
      over = aborted(common.wait) || masked(common, peer);
      if (!over && is_late(begin)) {
        blame(common, peer, wanted, expected, seen);
        over = true;
      }
    }
    if (kWaiting == Waiting::one_thread ? over : warp::any(over)) return false;
  }
}

/// poll_peer with the deadline of the call.
template <Waiting kWaiting = Waiting::one_thread, class Arrived>
DEEP_EP_DEVICE bool wait_for_peer(const LowLatencyParams& common, int peer, Wanted wanted, std::uint64_t expected,
                                  Arrived arrived) {
  const std::uint64_t timeout = common.wait.timeout_ns;
  return poll_peer<kWaiting>(common, peer, wanted, expected, arrived,
                             [&](std::uint64_t begin) { return timeout != 0 && now_ns() - begin > timeout; });
}

/// Waits until `*word >= expected`, acquiring at system scope.
DEEP_EP_DEVICE bool wait_for_signal(const LowLatencyParams& common, const std::uint64_t* word, std::uint64_t expected,
                                    int peer, Wanted wanted) {
  return wait_for_peer(common, peer, wanted, expected, [&](std::uint64_t& seen) {
    seen = load_acquire<Scope::system>(word);
    return seen >= expected;
  });
}

/// Waits for the payload of `epoch`.
DEEP_EP_DEVICE bool wait_for_cell(const LowLatencyParams& common, const Cell* cell, std::uint64_t epoch, int peer,
                                  Wanted wanted, std::uint64_t& payload) {
  return wait_for_peer(common, peer, wanted, epoch, [&](std::uint64_t& seen) {
    const Cell now = load_cell(cell);
    seen = now.epoch;
    payload = now.payload;
    return seen >= epoch;
  });
}

}  // namespace deep_ep::device
