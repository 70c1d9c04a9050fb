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

/// Which end of failed queue pairs is the cause: the one that most of all these pairs have in common. A process that
/// has ended takes its queue pairs along. Among equals the rank whose queue pair it is: its NIC knows what has failed.
class Failures {
 public:
  Failures(std::span<const RankFacts> ranks, std::span<const RankPair> failed)
      : ranks_(ranks), ends_(ranks.size()), of_(ranks.size(), kNobody), at_(ranks.size(), kNobody) {
    for (const RankPair& pair : failed) {
      ++ends_[index(pair.rank)].pairs;
      ++ends_[index(pair.peer)].pairs;
      ends_[index(pair.rank)].owns = true;
    }
    for (const RankPair& pair : failed) {
      const int cause = worse(pair.rank, pair.peer);
      for (int* known : {&of_[index(pair.rank)], &at_[index(pair.rank)], &at_[index(pair.peer)], &any_}) {
        *known = worse(*known, cause);
      }
    }
  }
  // kNobody: there is no such pair.
  int of(int rank) const { return of_[index(rank)]; }  ///< of the failed pairs of `rank` ...
  int at(int rank) const { return at_[index(rank)]; }  ///< ... of these and of those to it ...
  int any() const { return any_; }                     ///< ... of all

  int worse(int a, int b) const {
    if (a == kNobody || b == kNobody) return std::max(a, b);
    const auto weight = [&](int rank) {
      const Ends& ends = ends_[index(rank)];
      return std::tuple(ranks_[index(rank)].gone, ends.pairs, ends.owns, -rank);
    };
    return weight(a) > weight(b) ? a : b;
  }

 private:
  struct Ends {
    int pairs = 0;
    bool owns = false;
  };
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  std::span<const RankFacts> ranks_;
  std::vector<Ends> ends_;
  std::vector<int> of_, at_;
  int any_ = kNobody;
};

/// Of a chain that goes round.
int cause_of_circle(const Failures& failures, const std::vector<int>& circle) {
  const bool ended_itself = circle.size() == 1;
  int cause = kNobody;
  for (const int rank : circle) cause = failures.worse(cause, failures.of(rank));
  if (cause != kNobody) return cause;
  for (const int rank : circle) cause = failures.worse(cause, ended_itself ? rank : failures.at(rank));
  if (cause != kNobody) return cause;
  // Each rank reports one of its waits. Another of its waits leads to the rank with the failed queue pair.
  return failures.any() != kNobody ? failures.any() : *std::ranges::min_element(circle);
}

/// [rank]: the cause of the circle that it is on; kNobody: it is on none.
std::vector<int> causes_of_circles(std::span<const RankFacts> ranks, const Failures& failures) {
  std::vector<int> causes(ranks.size(), kNobody);
  std::vector<int> passed_from(ranks.size(), kNobody);
  for (int start = 0; start < static_cast<int>(ranks.size()); ++start) {
    int at = start;
    for (; at != kNobody && passed_from[static_cast<std::size_t>(at)] == kNobody; at = next_in_chain(ranks, at)) {
      passed_from[static_cast<std::size_t>(at)] = start;
    }
    if (at == kNobody || passed_from[static_cast<std::size_t>(at)] != start) continue;
    std::vector<int> circle{at};
    for (int next = next_in_chain(ranks, at); next != at; next = next_in_chain(ranks, next)) circle.push_back(next);
    const int cause = cause_of_circle(failures, circle);
    for (const int rank : circle) causes[static_cast<std::size_t>(rank)] = cause;
  }
  return causes;
}

}  // namespace

std::vector<int> judge(std::span<const RankFacts> ranks, std::span<const RankPair> failed) {
  const Failures failures(ranks, failed);
  const std::vector<int> circles = causes_of_circles(ranks, failures);
  const auto end_of_chain = [&](int rank) {
    for (;;) {
      const int next = next_in_chain(ranks, rank);
      if (next == kNobody) return rank;
      const int circle = circles[static_cast<std::size_t>(rank)];
      const int cause = circle != kNobody ? circle : failures.of(rank);
      if (cause != kNobody) return cause;
      rank = next;
    }
  };
  std::vector<int> lost;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankFacts& facts = ranks[static_cast<std::size_t>(rank)];
    const bool sends_nothing = facts.gone || facts.silent || next_in_chain(ranks, rank) != kNobody;
    lost.push_back(sends_nothing ? end_of_chain(rank) : kNobody);
  }
  return lost;
}

std::vector<Blame> silent_ranks(std::span<const RankSigns> ranks, std::span<const RankPair> waits) {
  std::vector<Blame> found;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankSigns& signs = ranks[static_cast<std::size_t>(rank)];
    if (signs.lost || !signs.silent) continue;
    int by = kNobody;
    for (const RankPair& wait : waits) {
      if (wait.peer != rank || wait.rank == rank || ranks[static_cast<std::size_t>(wait.rank)].lost) continue;
      if (by == kNobody || wait.rank < by) by = wait.rank;
    }
    if (by != kNobody) found.push_back({rank, by});
  }
  return found;
}

std::vector<Blame> unreachable_ranks(std::span<const RankSigns> ranks, std::span<const RankPair> pairs) {
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
    for (const RankPair& pair : pairs) {
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
        std::ranges::find_if(pairs, [&](const RankPair& pair) { return pair.peer == worst && !lost(pair.rank); });
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
