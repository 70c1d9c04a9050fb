// Waiting: every wait for somebody else has a deadline, and one that expires says who waited for whom, and for what.
//
// A signal is a 64-bit word in the memory of the rank that waits, and its value only grows. One rank raises it, by one
// thread or by several that each add a part, with release order at system scope, or at GPU scope where that rank itself
// waits. Waiting acquires: what these threads wrote before is visible after.
#pragma once

#include <cstdint>

#include "kernels/common/faults.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// What is waited for, as a fault record names it.
struct Awaited {
  int peer;
  Wanted wanted;
  std::uint64_t expected;
};

/// A wait under way.
struct Poll {
  std::uint64_t begin = 0;  ///< of its first look at the clock, in now_ns(); see kLeftPeerBits
  std::uint64_t seen = 0;   ///< set by the look: what was found instead, for the fault record
  /// The first look, and each one before the clock is read. A wait for several things may look at only one of them
  /// otherwise: polls of many threads slow down what they wait for.
  bool thorough = true;
  std::uint32_t left = 0;  ///< set by the look: 1 + a peer that has left, for which the next look may end the wait

  /// True if the wait for `peer` ends.
  DEEP_EP_DEVICE bool decides(int peer, Lateness found) {
    if (found == Lateness::look_again) left = static_cast<std::uint32_t>(peer) + 1;
    return found == Lateness::late;
  }
};

/// Polls until `arrived(poll)` is true. Now and then asks whether `gives_up(poll)`, and returns false when that is so.
/// All waits for what is outside this block are made of it. A warp may wait as a whole: its lanes stay together if both
/// functions return the same in all of them.
template <int kSpinsToLook = kPollsToLook, class Arrived, class GivesUp>
DEEP_EP_DEVICE bool poll_until(Arrived arrived, GivesUp gives_up) {
  static_assert((kSpinsToLook & (kSpinsToLook - 1)) == 0);
  Poll poll;
#pragma unroll 1
  for (std::uint32_t spins = 0;; ++spins) {
    const bool looks = spins % kSpinsToLook == kSpinsToLook - 1;
    poll.thorough = spins == 0 || looks;
    if (arrived(poll)) return true;
    pause(static_cast<int>(spins));
    if (!looks) continue;
    // Not before: what arrives while the clock is read waits for it.
    if (poll.begin == 0) poll.begin = now_ns() & ~kLeftPeerBits;
    poll.left = 0;
    if (gives_up(poll)) return false;
    poll.begin = (poll.begin & ~kLeftPeerBits) | poll.left;
  }
}

/// poll_until with a deadline. A policy decides about a wait:
///   bool called_off(const Awaited&)   nobody needs to wait for this any more
///   bool ends(const Awaited&, Poll&)  the time since its `begin` has run out, or the rank is lost or has left: puts it
///                                     on record, which ends the call; or goes on without the peer
/// They are asked in one thread of the group. False: what was waited for must not be touched.
template <class Group = OneThread, class Policy, class Arrived>
DEEP_EP_DEVICE bool wait_until(const Policy& policy, const Awaited& awaited, Arrived arrived) {
  return poll_until(arrived, [&](Poll& poll) {
    return Group::any(Group::leads() && (policy.called_off(awaited) || policy.ends(awaited, poll)));
  });
}

/// The usual policy: whoever is late, or lost, has ended the call. A wait for a word that this rank raises goes on: the
/// poster, or the warp, that raises it waits for another rank then, and puts that on record.
struct ReportLate {
  const WaitContext& context;

  DEEP_EP_DEVICE bool called_off(const Awaited&) const { return aborted(context); }
  DEEP_EP_DEVICE bool ends(const Awaited& awaited, Poll& poll) const {
    return awaited.wanted != Wanted::nothing && may_be_late(poll.begin) &&
           poll.decides(awaited.peer,
                        end_late_wait(context, awaited.peer, awaited.wanted, awaited.expected, poll.begin, poll.seen));
  }
};

/// Waits until `*signal >= awaited.expected`, acquiring at system scope.
template <class Group = OneThread, class Policy>
DEEP_EP_DEVICE bool wait_signal(const Policy& policy, const std::uint64_t* signal, const Awaited& awaited) {
  return wait_until<Group>(policy, awaited, [&](Poll& poll) {
    poll.seen = load_acquire<Scope::system>(signal);
    return !Group::any(poll.seen < awaited.expected);
  });
}
template <class Group = OneThread>
DEEP_EP_DEVICE bool wait_signal(const WaitContext& context, const std::uint64_t* signal, const Awaited& awaited) {
  return wait_signal<Group>(ReportLate{context}, signal, awaited);
}

}  // namespace deep_ep::device
