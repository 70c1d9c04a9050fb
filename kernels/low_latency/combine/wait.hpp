// Deadlines of combine. Ranks wait for each other in a row: an expert rank for the selections of an owner, the owner
// for rows of the expert rank. When a rank is lost, the others must all blame that one, and nobody who merely waited
// for it.
//
//   - Nobody is held up by somebody else's lateness: selections are told to those who are ready first, and rows whose
//     selections are late are put off. So a rank waits for nobody but those that it names.
//   - With masking, a rank that has not even begun the call is given the whole deadline, one that has begun it half of
//     that: who finds a rank lost in the middle of a call is late for the next one by half a deadline, and the others
//     bear that.
//   - With masking, each rank waits for all others to begin, whether it has to do with them or not. So all find out at
//     once that a rank has not come. Without it, nobody tells that it has begun, and all deadlines are whole.
//
// By rails (never with masking) an owner waits for a relay, which waits for the ranks of its node: if one of these is
// lost in the middle of a call, the owner may name the relay. So may a receiver of dispatch name a source whose rows a
// relay did not hand on.
#pragma once

#include "kernels/low_latency/transport/wait.hpp"

namespace deep_ep::device::low_latency {

/// Has `peer` begun the send part of call `epoch`? Told with masking only.
DEEP_EP_DEVICE bool has_begun(const LowLatencyParams& common, int peer, std::uint64_t epoch) {
  return load_relaxed<Scope::system>(reinterpret_cast<const std::uint64_t*>(
             common.local + common.window.begun_at(LowLatencyKind::combine, peer))) >= epoch;
}

/// Has the time for `peer` run out that began at `begin` (of now_ns)?
DEEP_EP_DEVICE bool is_late(const LowLatencyParams& common, int peer, std::uint64_t epoch, std::uint64_t begin) {
  const std::uint64_t deadline = common.wait.timeout_ns;
  if (deadline == 0) return false;
  const std::uint64_t waited = now_ns() - begin;
  return waited > deadline || (waited > deadline / 2 && has_begun(common, peer, epoch));
}

/// wait_for_signal with the deadlines of combine: until `*word` of `peer` is `expected` in call `epoch`.
DEEP_EP_DEVICE bool await_word(const LowLatencyParams& common, const std::uint64_t* word, std::uint64_t expected,
                               std::uint64_t epoch, int peer, Wanted wanted) {
  const auto arrived = [&](std::uint64_t& seen) {
    seen = load_acquire<Scope::system>(word);
    return seen >= expected;
  };
  return poll_peer<Waiting::one_thread>(common, peer, wanted, expected, arrived,
                                        [&](std::uint64_t begin) { return is_late(common, peer, epoch, begin); });
}

}  // namespace deep_ep::device::low_latency
