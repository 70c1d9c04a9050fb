// Do two ranks mean the same call, and rows of the same kind?
#pragma once

#include "kernels/common/rows.hpp"
#include "kernels/common/wait.hpp"

namespace deep_ep::device {

/// In which word does the call of another rank differ from this rank's, though it must not? -1: in none.
DEEP_EP_DEVICE int differing_word(const CallShape& ours, const CallShape& theirs) {
  for (int word = 0; word < CallShape::kWords; ++word) {
    if (theirs.word[word] != ours.word[word]) return word;
  }
  return -1;
}

/// Compares the call of rank `peer` with this rank's. False after a fault, which every rank meets. Every block of the
/// kernel has begun by then: one that begins after a fault takes no part, and ranks would no longer be in step.
DEEP_EP_DEVICE bool agrees_on_call(const WaitContext& wait, const CallShape& ours, const CallShape& theirs, int peer) {
  const int word = differing_word(ours, theirs);
  if (word < 0) return true;
  report_fault(wait, FaultKind::mismatch, Wanted::counts, peer, word, static_cast<std::uint64_t>(ours.word[word]),
               static_cast<std::uint64_t>(theirs.word[word]));
  return false;
}

/// Compares the rows of two ranks, field by field.
struct RowComparison {
  int field = -1;  ///< the first RowField in which they differ; negative: they agree
  std::uint64_t ours = 0, theirs = 0;

  DEEP_EP_DEVICE void compare(RowField which, std::int64_t our_value, std::int64_t their_value) {
    if (field >= 0 || our_value == their_value) return;
    field = static_cast<int>(which);
    ours = static_cast<std::uint64_t>(our_value);
    theirs = static_cast<std::uint64_t>(their_value);
  }
};

}  // namespace deep_ep::device
