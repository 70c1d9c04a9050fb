// Has a thread a proxy fence between what it has acquired and its next bulk copy?
//
// An acquire orders ordinary accesses. The copy engine's come by another proxy, and stay behind the signal
// only if a proxy fence lies between (PTX ISA, "Causality Order": proxy-preserved base causality order). A copy that
// came too early cannot be shown afterwards, so a missing fence is an error here instead of a wrong result.
//
// Acquires are numbered when their thread meets others. A thread knows how many acquires lie in its past, and up to
// which of them a fence does. That is one number where an exact answer would take one per thread: an acquire without a
// fence goes unnoticed if a thread that did not know of it numbered one later and fenced it, and both met afterwards.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "machine/fiber.hpp"

namespace deep_ep::host_machine {

/// The point where threads meet. A thread releases it before it arrives and acquires it when it goes on, for
/// ThreadSanitizer too, to which the address is enough.
struct MeetingPoint {
  std::uint64_t acquired = 0;  ///< number of the last acquire in the past of those who came
  std::uint64_t fenced = 0;    ///< and of the last one with a proxy fence behind it
};

class ProxyOrder {
 public:
  explicit ProxyOrder(int threads) : past_(static_cast<std::size_t>(threads)) {}

  void release(Fiber& fiber, MeetingPoint& point) {
    MeetingPoint& past = past_of(fiber);
    if (fiber.state.acquired) past.acquired = ++acquires_;
    fiber.state.acquired = false;
    join(point, past);
  }
  void acquire(const Fiber& fiber, const MeetingPoint& point) { join(past_of(fiber), point); }
  void fence(Fiber& fiber) {
    fiber.state.acquired = false;
    past_of(fiber).fenced = past_of(fiber).acquired;
  }
  bool is_fenced(const Fiber& fiber) {
    return !fiber.state.acquired && past_of(fiber).acquired <= past_of(fiber).fenced;
  }

 private:
  static void join(MeetingPoint& to, const MeetingPoint& from) {
    to.acquired = std::max(to.acquired, from.acquired);
    to.fenced = std::max(to.fenced, from.fenced);
  }
  MeetingPoint& past_of(const Fiber& fiber) { return past_[static_cast<std::size_t>(fiber.state.thread)]; }

  std::vector<MeetingPoint> past_;  ///< of each thread
  std::uint64_t acquires_ = 0;
};

}  // namespace deep_ep::host_machine
