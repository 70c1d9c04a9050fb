// Do two ranks mean the same call, and rows of the same kind?
#pragma once

#include "kernels/common/rows.hpp"
#include "kernels/common/wait.hpp"

namespace deep_ep::device {

/// The first of some words that must be equal in which two ranks differ.
struct Difference {
  int at = -1;  ///< negative: they agree
  std::uint64_t ours = 0, theirs = 0;
};

template <class Word, int kWords>
DEEP_EP_DEVICE Difference difference(const Word (&ours)[kWords], const Word (&theirs)[kWords]) {
  Difference found;
#pragma unroll
  for (int i = kWords - 1; i >= 0; --i) {
    if (ours[i] == theirs[i]) continue;
    found = {i, static_cast<std::uint64_t>(ours[i]), static_cast<std::uint64_t>(theirs[i])};
  }
  return found;
}

/// Compares the call of rank `peer` with this rank's. False after a fault, which every rank meets. Every block of the
/// kernel has begun by then: one that begins after a fault takes no part, and ranks would no longer be in step.
DEEP_EP_DEVICE bool agrees_on_call(const WaitContext& wait, const CallShape& ours, const CallShape& theirs, int peer) {
  const Difference found = difference(ours.word, theirs.word);
  if (found.at < 0) return true;
  report_fault(wait, FaultKind::mismatch, Wanted::counts, peer, found.at, found.ours, found.theirs);
  return false;
}

}  // namespace deep_ep::device
