#include "csrc/control/verdict.hpp"

#include <algorithm>
#include <cstddef>

namespace deep_ep::control {
namespace {

/// The rank that `rank` gave up on, unless the chain ends here.
int next_in_chain(std::span<const RankFacts> ranks, int rank) {
  const RankFacts& facts = ranks[static_cast<std::size_t>(rank)];
  const bool names_one = facts.gave_up_on >= 0 && facts.gave_up_on < static_cast<int>(ranks.size());
  return !facts.gone && names_one ? facts.gave_up_on : kNobody;
}

/// Of a chain that goes round: its lowest rank, whichever of them one comes from.
int lowest_of_circle(std::span<const RankFacts> ranks, int on_it) {
  int lowest = on_it;
  for (int at = next_in_chain(ranks, on_it); at != on_it; at = next_in_chain(ranks, at)) lowest = std::min(lowest, at);
  return lowest;
}

int end_of_chain(std::span<const RankFacts> ranks, int rank) {
  for (std::size_t steps = 0; steps < ranks.size(); ++steps) {
    const int next = next_in_chain(ranks, rank);
    if (next == kNobody) return rank;
    rank = next;
  }
  return lowest_of_circle(ranks, rank);
}

}  // namespace

std::vector<int> judge(std::span<const RankFacts> ranks) {
  std::vector<int> lost;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const bool sends_nothing = ranks[static_cast<std::size_t>(rank)].gone || next_in_chain(ranks, rank) != kNobody;
    lost.push_back(sends_nothing ? end_of_chain(ranks, rank) : kNobody);
  }
  return lost;
}

}  // namespace deep_ep::control
