// Who does something: one thread by itself, or the 32 lanes of a warp together.
#pragma once

#include <cstdint>

#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// Every call is this thread's own.
struct OneThread {
  DEEP_EP_DEVICE static bool leads() { return true; }
  DEEP_EP_DEVICE static void sync() {}
  /// Bit i: member i wants to.
  DEEP_EP_DEVICE static std::uint32_t vote(bool wanted) { return wanted ? 1 : 0; }
  DEEP_EP_DEVICE static bool any(bool predicate) { return predicate; }
  DEEP_EP_DEVICE static std::uint32_t members_before() { return 0; }  ///< as bits of a vote
  /// The leader's value, in every member.
  template <class T>
  DEEP_EP_DEVICE static T from_leader(T value) {
    return value;
  }
};

/// All 32 lanes make every call.
struct WholeWarp {
  DEEP_EP_DEVICE static bool leads() { return lane_index() == 0; }
  DEEP_EP_DEVICE static void sync() { warp::sync(); }
  DEEP_EP_DEVICE static std::uint32_t vote(bool wanted) { return warp::ballot(wanted); }
  DEEP_EP_DEVICE static bool any(bool predicate) { return warp::any(predicate); }
  DEEP_EP_DEVICE static std::uint32_t members_before() { return (1u << lane_index()) - 1; }
  template <class T>
  DEEP_EP_DEVICE static T from_leader(T value) {
    return warp::shuffle(value, 0);
  }
};

}  // namespace deep_ep::device
