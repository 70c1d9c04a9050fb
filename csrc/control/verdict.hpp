// The verdict: which ranks are lost, as a pure function of the facts that are known of them.
//
// A rank whose process has ended is gone. A rank that has waited for a lost one has ended its calls, and tells that: it
// sends nothing any more, so those that wait for it wait in vain, too. Their chain ends at the rank that is gone, which
// all of them name.
#pragma once

#include <span>
#include <vector>

namespace deep_ep::control {

inline constexpr int kNobody = -1;

/// The facts that are known of a rank.
struct RankFacts {
  bool gone = false;         ///< its process has ended, and the rank had not left the buffer
  int gave_up_on = kNobody;  ///< it has ended its calls, as it waited for this rank in vain
  bool operator==(const RankFacts&) const = default;
};

/// [rank]: nothing comes of it any more, because of this rank; kNobody: waits for it go on. Late or contradictory
/// reports (of ranks that gave up on each other, of one that nobody knows to be gone) have the same outcome wherever
/// they are known.
std::vector<int> judge(std::span<const RankFacts> ranks);

}  // namespace deep_ep::control
