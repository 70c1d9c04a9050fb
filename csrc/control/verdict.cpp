#include "csrc/control/verdict.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>

namespace deep_ep::control {
namespace {

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

bool names(std::span<const Blame> blamed, int rank) {
  return std::ranges::find(blamed, rank, &Blame::rank) != blamed.end();
}

}  // namespace

std::vector<int> judge(std::span<const RankFacts> ranks, std::span<const RankPair> failed) {
  const int size = static_cast<int>(ranks.size());
  /// [rank]: the failed queue pairs that it is an end of, whether one of them is its own, and the cause of its own
  /// ones.
  struct Ends {
    int pairs = 0;
    bool owns = false;
    int cause = kNobody;
  };
  std::vector<Ends> ends(ranks.size());
  for (const RankPair& pair : failed) {
    ++ends[index(pair.rank)].pairs;
    ++ends[index(pair.peer)].pairs;
    ends[index(pair.rank)].owns = true;
  }
  // Which end of failed queue pairs is the cause: the one that most of all these pairs have in common. A process that
  // has ended takes its queue pairs along. Among equals the rank whose queue pair it is: its NIC knows what has failed.
  const auto worse = [&](int a, int b) {
    if (a == kNobody || b == kNobody) return std::max(a, b);
    const auto weight = [&](int rank) {
      return std::tuple(ranks[index(rank)].gone, ends[index(rank)].pairs, ends[index(rank)].owns, -rank);
    };
    return weight(a) > weight(b) ? a : b;
  };
  for (const RankPair& pair : failed) {
    int& cause = ends[index(pair.rank)].cause;
    cause = worse(cause, worse(pair.rank, pair.peer));
  }
  /// The rank that `rank` gave up on, unless the chain ends here.
  const auto next = [&](int rank) {
    const RankFacts& facts = ranks[index(rank)];
    const bool names_one = facts.gave_up_on >= 0 && facts.gave_up_on < size;
    return !facts.gone && !facts.silent && names_one ? facts.gave_up_on : kNobody;
  };
  /// The chain from `rank` back to it; empty: it does not come back.
  const auto circle_of = [&](int rank) {
    std::vector<int> passed{rank};
    for (int at = next(rank); at != rank; at = next(at)) {
      if (at == kNobody || passed.size() == ranks.size()) return std::vector<int>();
      passed.push_back(at);
    }
    return passed;
  };
  const auto cause_of_circle = [&](const std::vector<int>& circle) {
    int cause = kNobody;
    for (const int rank : circle) cause = worse(cause, ends[index(rank)].cause);
    if (cause != kNobody) return cause;
    if (circle.size() == 1) return circle.front();  // it has ended itself
    int of_all = kNobody;
    for (const RankPair& pair : failed) {
      const int of_pair = worse(pair.rank, pair.peer);
      of_all = worse(of_all, of_pair);
      if (std::ranges::find(circle, pair.peer) != circle.end()) cause = worse(cause, of_pair);
    }
    if (cause != kNobody) return cause;
    // Each rank reports one of its waits. Another of its waits leads to the rank with the failed queue pair.
    return of_all != kNobody ? of_all : *std::ranges::min_element(circle);
  };
  const auto end_of_chain = [&](int rank) {
    for (;; rank = next(rank)) {
      if (next(rank) == kNobody) return rank;
      const std::vector<int> circle = circle_of(rank);
      const int cause = circle.empty() ? ends[index(rank)].cause : cause_of_circle(circle);
      if (cause != kNobody) return cause;
    }
  };
  std::vector<int> lost;
  for (int rank = 0; rank < size; ++rank) {
    const RankFacts& facts = ranks[index(rank)];
    const bool sends_nothing = facts.gone || facts.silent || next(rank) != kNobody;
    lost.push_back(sends_nothing ? end_of_chain(rank) : kNobody);
  }
  return lost;
}

std::vector<Blame> silent_ranks(std::span<const RankSigns> ranks, std::span<const RankPair> waits) {
  std::vector<Blame> found;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankSigns& signs = ranks[index(rank)];
    if (signs.lost || !signs.silent) continue;
    int by = kNobody;
    for (const RankPair& wait : waits) {
      if (wait.peer != rank || wait.rank == rank || ranks[index(wait.rank)].lost) continue;
      if (by == kNobody || wait.rank < by) by = wait.rank;
    }
    if (by != kNobody) found.push_back({rank, by});
  }
  const auto leads_to_another = [&, all = found](const Blame& blame) {
    int end = blame.rank;
    for (std::size_t steps = 0; steps < ranks.size(); ++steps) {
      const int next = ranks[index(end)].waits_for;
      if (!names(all, next)) return end != blame.rank;
      end = next;
    }
    return false;  // round a circle
  };
  std::erase_if(found, leads_to_another);
  return found;
}

std::vector<Blame> unreachable_ranks(std::span<const RankSigns> ranks, std::span<const RankPair> pairs) {
  struct Ends {
    int pairs = 0;  ///< that failed, by whichever end
    int named = 0;  ///< as the peer
    auto operator<=>(const Ends&) const = default;
  };
  std::vector<RankSigns> left(ranks.begin(), ranks.end());
  const auto lost = [&](int rank) -> bool& { return left[index(rank)].lost; };
  std::vector<Blame> found;
  for (;;) {
    std::vector<Ends> ends(ranks.size());
    for (const RankPair& pair : pairs) {
      if (lost(pair.rank) || lost(pair.peer)) continue;
      ++ends[index(pair.rank)].pairs;
      ++ends[index(pair.peer)].pairs;
      ++ends[index(pair.peer)].named;
    }
    const auto place = std::max_element(ends.rbegin(), ends.rend());  // the last of the largest
    if (place == ends.rend() || place->pairs == 0) return found;
    const int worst = static_cast<int>(ends.rend() - place) - 1;
    const auto report =
        std::ranges::find_if(pairs, [&](const RankPair& pair) { return pair.peer == worst && !lost(pair.rank); });
    found.push_back({worst, report == pairs.end() ? worst : report->rank});
    lost(worst) = true;
  }
}

int deciders_before(int rank, std::span<const RankSigns> ranks, std::span<const Blame> blamed) {
  int before = 0;
  for (int lower = 0; lower < rank; ++lower) before += !ranks[index(lower)].lost && !names(blamed, lower) ? 1 : 0;
  return before;
}

}  // namespace deep_ep::control
