#include "csrc/control/verdict.hpp"

#include <algorithm>
#include <array>

namespace deep_ep::control {
namespace {

bool names(const std::vector<LostRank>& blamed, int rank) {
  return std::ranges::find(blamed, rank, &LostRank::rank) != blamed.end();
}

}  // namespace

std::vector<LostRank> silent_ranks(const Evidence& evidence) {
  const std::vector<RankFacts>& ranks = evidence.ranks;
  const auto is_out = [&](int rank) { return ranks[index(rank)].lost || ranks[index(rank)].gave_up_on != kNobody; };
  std::vector<LostRank> found;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (is_out(rank) || !ranks[index(rank)].silent) continue;
    const auto accuses = [&](const RankPair& wait) { return wait.peer == rank && !is_out(wait.rank); };
    const auto wait = std::ranges::find_if(evidence.late, accuses);
    if (wait != evidence.late.end()) found.push_back({.rank = rank, .why = LostWhy::silent, .by = wait->rank});
  }
  std::vector<LostRank> ends = found;
  std::erase_if(ends, [&](const LostRank& blame) { return names(found, ranks[index(blame.rank)].waits_for); });
  return ends.empty() ? found : ends;  // empty: they wait for each other
}

std::vector<LostRank> failed_ranks(const Evidence& evidence, PairEnd end) {
  std::vector<RankPair> pairs = evidence.failed;  // that are not explained yet
  const auto explain = [&](int rank) {
    std::erase_if(pairs, [&](const RankPair& pair) { return pair.rank == rank || pair.peer == rank; });
  };
  for (std::size_t rank = 0; rank < evidence.ranks.size(); ++rank) {
    if (evidence.ranks[rank].lost) explain(static_cast<int>(rank));
  }
  std::vector<LostRank> found;
  while (!pairs.empty()) {
    std::vector<std::array<int, 2>> of(evidence.ranks.size());  // [rank]: all of it, and those of which it is that end
    for (const RankPair& pair : pairs) {
      ++of[index(pair.rank)][0];
      ++of[index(pair.peer)][0];
      ++of[index(end == PairEnd::owner ? pair.rank : pair.peer)][1];
    }
    const int worst = static_cast<int>(std::ranges::max_element(of) - of.begin());  // the first of the largest
    const auto report = std::ranges::find(pairs, worst, &RankPair::peer);
    found.push_back({.rank = worst, .why = LostWhy::failed, .by = report == pairs.end() ? worst : report->rank});
    explain(worst);
  }
  return found;
}

std::vector<int> ends_of_chains(const Evidence& evidence) {
  const std::vector<LostRank> causes = failed_ranks(evidence, PairEnd::owner);
  const auto facts = [&](int rank) -> const RankFacts& { return evidence.ranks[index(rank)]; };
  const auto is_end = [&](int rank) {
    const int next = facts(rank).gave_up_on;
    return facts(rank).lost || names(causes, rank) || next == rank || next == kNobody;
  };
  const auto end_of_chain = [&](int rank) {
    std::vector<int> passed;
    for (; !is_end(rank); rank = facts(rank).gave_up_on) {
      const auto circle = std::ranges::find(passed, rank);
      // Each rank reports one of its waits. Another wait of the circle leads to the rank with failed queue pairs.
      if (circle != passed.end()) return causes.empty() ? *std::min_element(circle, passed.end()) : causes.front().rank;
      passed.push_back(rank);
    }
    return rank;
  };
  std::vector<int> ends;
  for (int rank = 0; rank < static_cast<int>(evidence.ranks.size()); ++rank) {
    ends.push_back(facts(rank).lost || facts(rank).gave_up_on != kNobody ? end_of_chain(rank) : kNobody);
  }
  return ends;
}

}  // namespace deep_ep::control
