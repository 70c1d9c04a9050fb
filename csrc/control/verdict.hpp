// The verdict: which ranks are lost, as pure functions of the facts that are known of them.
//
// A rank whose process has ended is gone. A rank is silent if others have waited for it for longer than the time-out,
// and it has reported no wait of its own for as long: a rank that waits itself reports that, so the chain of waits ends
// at the silent one. Without masks, a rank that has waited for a lost one has ended its calls, and tells that: it sends
// nothing any more, so those that wait for it wait in vain, too. All of them name the rank at the end of the chain.
// Ranks that wait for each other in a circle are not the cause if a queue pair has failed: what one of them waits for
// was lost there.
#pragma once

#include <compare>
#include <span>
#include <vector>

namespace deep_ep::control {

inline constexpr int kNobody = -1;

/// Without masks: the facts that are known of a rank.
struct RankFacts {
  bool gone = false;         ///< its process has ended, and the rank had not left the buffer
  bool silent = false;       ///< others have waited for it for longer than the time-out
  int gave_up_on = kNobody;  ///< it has ended its calls, as it waited for this rank in vain
};

/// A queue pair of `rank` to `peer` that has failed; or a wait of `rank` for `peer`.
struct RankPair {
  int rank = 0;
  int peer = 0;
  auto operator<=>(const RankPair&) const = default;
};

/// [rank]: nothing comes of it any more, because of this rank; kNobody: waits for it go on. Late or contradictory
/// reports (of ranks that gave up on each other, of one that no rank knows to be gone) have the same outcome wherever
/// they are known, in whichever order they came.
std::vector<int> judge(std::span<const RankFacts> ranks, std::span<const RankPair> failed = {});

/// The signs that a rank has given.
struct RankSigns {
  bool lost = false;        ///< the verdict has been given already, or its process has ended
  bool silent = false;      ///< it has reported no wait for a whole time-out
  int waits_for = kNobody;  ///< its last report
};
struct Blame {
  int rank = 0;
  int by = kNobody;  ///< the rank whose report decided
  bool operator==(const Blame&) const = default;
};
/// The ranks that are lost by silence, in order. `waits`: those that have been reported for longer than the time-out.
/// Ranks that all wait for each other report that they do, and none of them is lost: the calls of their programs do not
/// match. Nor is a silent rank lost whose last reports lead to another silent one: that one may be all that it waits
/// for, and its own control thread may merely get no time to say so.
std::vector<Blame> silent_ranks(std::span<const RankSigns> ranks, std::span<const RankPair> waits);

/// The ranks to go on without, so that no failed pair is left: first the one with most failed pairs, so that a rank
/// whose NIC has failed is not taken for healthy, nor those at the other ends for failed. Among equals the one that
/// others name more often, then the highest.
std::vector<Blame> unreachable_ranks(std::span<const RankSigns> ranks, std::span<const RankPair> pairs);

/// With masks: how many ranks decide before `rank` does, the lower ones that are neither lost nor `blamed`. The next
/// one decides where the first does not: its thread may stand still, though no rank waits for it.
int deciders_before(int rank, std::span<const RankSigns> ranks, std::span<const Blame> blamed);

}  // namespace deep_ep::control
