// The verdict: which ranks are lost, as pure functions of what is known of them.
//
// A rank whose process has ended is lost. So is one that keeps others waiting for longer than the time-out and reports
// no wait of its own: a rank that waits itself says so, so the chain of waits ends at the silent one. Without masks, a
// rank that has waited for a lost one ends its calls and tells that: it sends nothing any more, so the waits for it are
// in vain, too. All of them name the rank at the end of the chain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deep_ep::control {

inline constexpr int kNobody = -1;
/// Of a rank in containers.
constexpr std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

enum class LostWhy : std::uint32_t {
  unknown,
  gone,    ///< its process has ended
  silent,  ///< others have waited for it for longer than the time-out, and it has reported no wait of its own
  ended,   ///< it has ended its calls
  failed,  ///< it cannot be reached by RDMA
  left,    ///< it has left the buffer: no verdict, but with masks calls go on without it
};
/// A verdict.
struct LostRank {
  int rank = 0;
  LostWhy why = LostWhy::unknown;
  int by = kNobody;          ///< the rank whose report decided
  std::uint32_t wanted = 0;  ///< silent: what that rank waited for ...
  double waited_s = 0;       ///< ... and for how long
};

struct RankFacts {
  bool lost = false;         ///< the verdict has been given
  bool silent = false;       ///< it has reported no wait for a whole time-out
  int waits_for = kNobody;   ///< its last report
  int gave_up_on = kNobody;  ///< it has ended its calls, as it waited for this rank in vain; or itself: by an error
};
struct RankPair {
  int rank = 0;
  int peer = 0;
};
struct Evidence {
  std::vector<RankFacts> ranks;
  std::vector<RankPair> late;    ///< waits of `rank` for `peer` that have lasted for longer than the time-out
  std::vector<RankPair> failed;  ///< queue pairs of `rank` to `peer`
};

/// The ranks that are lost by silence, in order. Ranks that all wait for each other report that they do, and none of
/// them is lost: the calls of their programs do not match. Nor is a silent rank lost whose last report leads to another
/// silent one: that one may be all that it waits for, and its own control thread may merely get no time to say so.
std::vector<LostRank> silent_ranks(const Evidence& evidence);

/// The ranks without which no failed queue pair is left: first the one with most of them, so that a rank whose NIC has
/// failed is not taken for healthy, nor those at the other ends for failed. Among equals one at this end of most pairs:
/// the owner, whose error names NIC and queue pair, or the peer, whose machine may have lost its power.
enum class PairEnd : bool { owner, peer };
std::vector<LostRank> failed_ranks(const Evidence& evidence, PairEnd end);

/// Without masks, [rank]: nothing comes of it any more, because of this rank; kNobody: waits for it go on. A chain ends
/// at a rank that is lost, has ended by an error, or is the cause of failed queue pairs. A circle has such a cause, or
/// else its lowest rank. Late or contradictory reports have the same outcome wherever they are known, in any order.
std::vector<int> ends_of_chains(const Evidence& evidence);

}  // namespace deep_ep::control
