#include "csrc/control/verdict.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>

namespace deep_ep::control {
namespace {

/// The rank that `rank` gave up on, unless the chain ends here.
int next_in_chain(std::span<const RankFacts> ranks, int rank) {
  const RankFacts& facts = ranks[static_cast<std::size_t>(rank)];
  const bool names_one = facts.gave_up_on >= 0 && facts.gave_up_on < static_cast<int>(ranks.size());
  return !facts.gone && !facts.silent && names_one ? facts.gave_up_on : kNobody;
}

/// The end that most of the failed queue pairs have in common, of those that `concerns` chooses; kNobody: it chooses
/// none. A process that has ended takes its queue pairs along. Among equals the rank whose queue pair it is: its NIC
/// knows what has failed.
template <class Concerns>
int end_of_failures(std::span<const RankFacts> ranks, std::span<const FailedPair> failed, Concerns concerns) {
  const auto weight = [&](int rank) {
    const auto ends = [&](const FailedPair& pair) { return pair.rank == rank || pair.peer == rank; };
    const bool gone = ranks[static_cast<std::size_t>(rank)].gone;
    const bool owns = std::ranges::find(failed, rank, &FailedPair::rank) != failed.end();
    return std::tuple(gone, std::ranges::count_if(failed, ends), owns, -rank);
  };
  int worst = kNobody;
  for (const FailedPair& pair : failed) {
    if (!concerns(pair)) continue;
    for (const int rank : {pair.rank, pair.peer}) {
      if (worst == kNobody || weight(rank) > weight(worst)) worst = rank;
    }
  }
  return worst;
}

/// Of a chain that goes round, whichever of its ranks one comes from.
int cause_of_circle(std::span<const RankFacts> ranks, std::span<const FailedPair> failed, int on_it) {
  std::vector<int> circle{on_it};
  for (int at = next_in_chain(ranks, on_it); at != on_it; at = next_in_chain(ranks, at)) circle.push_back(at);
  if (circle.size() == 1) return on_it;  // it has ended its calls by itself
  const auto is_on_it = [&](int rank) { return std::ranges::find(circle, rank) != circle.end(); };
  const int near = end_of_failures(ranks, failed,
                                   [&](const FailedPair& pair) { return is_on_it(pair.rank) || is_on_it(pair.peer); });
  if (near != kNobody) return near;
  // Each rank reports one of its waits. Another of its waits leads to the rank with the failed queue pair.
  const int any = end_of_failures(ranks, failed, [](const FailedPair&) { return true; });
  return any != kNobody ? any : *std::ranges::min_element(circle);
}

int end_of_chain(std::span<const RankFacts> ranks, std::span<const FailedPair> failed, int rank) {
  for (std::size_t steps = 0; steps < ranks.size(); ++steps) {
    const int next = next_in_chain(ranks, rank);
    if (next == kNobody) return rank;
    const int end = end_of_failures(ranks, failed, [&](const FailedPair& pair) { return pair.rank == rank; });
    if (end != kNobody) return end;
    rank = next;
  }
  return cause_of_circle(ranks, failed, rank);
}

}  // namespace

std::vector<int> judge(std::span<const RankFacts> ranks, std::span<const FailedPair> failed) {
  std::vector<int> lost;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankFacts& facts = ranks[static_cast<std::size_t>(rank)];
    const bool sends_nothing = facts.gone || facts.silent || next_in_chain(ranks, rank) != kNobody;
    lost.push_back(sends_nothing ? end_of_chain(ranks, failed, rank) : kNobody);
  }
  return lost;
}

std::vector<Blame> silent_ranks(std::span<const RankSigns> ranks, std::span<const LateWait> waits) {
  std::vector<Blame> found;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankSigns& signs = ranks[static_cast<std::size_t>(rank)];
    if (signs.lost || !signs.silent) continue;
    int by = kNobody;
    for (const LateWait& wait : waits) {
      if (wait.peer != rank || wait.rank == rank || ranks[static_cast<std::size_t>(wait.rank)].lost) continue;
      if (by == kNobody || wait.rank < by) by = wait.rank;
    }
    if (by != kNobody) found.push_back({rank, by});
  }
  return found;
}

std::vector<Blame> unreachable_ranks(std::span<const RankSigns> ranks, std::span<const FailedPair> pairs) {
  struct Ends {
    int pairs = 0;  ///< that failed, by whichever end
    int named = 0;  ///< as the peer
    auto operator<=>(const Ends&) const = default;
  };
  std::vector<RankSigns> left(ranks.begin(), ranks.end());
  const auto lost = [&](int rank) -> bool& { return left[static_cast<std::size_t>(rank)].lost; };
  std::vector<Blame> found;
  for (;;) {
    std::vector<Ends> ends(ranks.size());
    for (const FailedPair& pair : pairs) {
      if (lost(pair.rank) || lost(pair.peer)) continue;
      ++ends[static_cast<std::size_t>(pair.rank)].pairs;
      ++ends[static_cast<std::size_t>(pair.peer)].pairs;
      ++ends[static_cast<std::size_t>(pair.peer)].named;
    }
    // The last of the largest.
    const auto place = std::max_element(ends.rbegin(), ends.rend());
    if (place == ends.rend() || place->pairs == 0) return found;
    const int worst = static_cast<int>(ends.rend() - place) - 1;
    const auto report =
        std::ranges::find_if(pairs, [&](const FailedPair& pair) { return pair.peer == worst && !lost(pair.rank); });
    found.push_back({worst, report == pairs.end() ? worst : report->rank});
    lost(worst) = true;
  }
}

int deciders_before(int rank, std::span<const RankSigns> ranks, std::span<const Blame> blamed) {
  int before = 0;
  for (int lower = 0; lower < rank; ++lower) {
    const bool decides =
        !ranks[static_cast<std::size_t>(lower)].lost && std::ranges::find(blamed, lower, &Blame::rank) == blamed.end();
    before += decides ? 1 : 0;
  }
  return before;
}

}  // namespace deep_ep::control
