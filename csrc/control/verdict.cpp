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
    int by = kNobody;
    for (const RankPair& wait : evidence.late) {
      if (wait.peer != rank || wait.rank == rank || is_out(wait.rank)) continue;
      if (by == kNobody || wait.rank < by) by = wait.rank;
    }
    if (by != kNobody) found.push_back({.rank = rank, .why = LostWhy::silent, .by = by});
  }
  const auto leads_to_another = [&, all = found](const LostRank& blame) {
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

std::vector<LostRank> failed_ranks(const Evidence& evidence, PairEnd end) {
  std::vector<bool> lost;
  for (const RankFacts& facts : evidence.ranks) lost.push_back(facts.lost);
  std::vector<LostRank> found;
  for (;;) {
    std::vector<std::array<int, 2>> pairs(lost.size());  // [rank]: all of it, and those of which it is that end
    for (const RankPair& pair : evidence.failed) {
      if (lost[index(pair.rank)] || lost[index(pair.peer)]) continue;
      ++pairs[index(pair.rank)][0];
      ++pairs[index(pair.peer)][0];
      ++pairs[index(end == PairEnd::owner ? pair.rank : pair.peer)][1];
    }
    const auto most = std::ranges::max_element(pairs);  // the first of the largest
    if (most == pairs.end() || most->front() == 0) return found;
    const int worst = static_cast<int>(most - pairs.begin());
    const auto report = std::ranges::find_if(
        evidence.failed, [&](const RankPair& pair) { return pair.peer == worst && !lost[index(pair.rank)]; });
    const int by = report == evidence.failed.end() ? worst : report->rank;
    found.push_back({.rank = worst, .why = LostWhy::failed, .by = by});
    lost[index(worst)] = true;
  }
}

std::vector<int> ends_of_chains(const Evidence& evidence) {
  const int size = static_cast<int>(evidence.ranks.size());
  const std::vector<LostRank> causes = failed_ranks(evidence, PairEnd::owner);
  const auto facts = [&](int rank) -> const RankFacts& { return evidence.ranks[index(rank)]; };
  const auto has_given_up = [&](int rank) { return facts(rank).gave_up_on >= 0 && facts(rank).gave_up_on < size; };
  const auto is_end = [&](int rank) {
    return facts(rank).lost || names(causes, rank) || facts(rank).gave_up_on == rank || !has_given_up(rank);
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
  for (int rank = 0; rank < size; ++rank) {
    ends.push_back(facts(rank).lost || has_given_up(rank) ? end_of_chain(rank) : kNobody);
  }
  return ends;
}

int deciders_before(int rank, const std::vector<RankFacts>& ranks, const std::vector<LostRank>& blamed) {
  int before = 0;
  for (int lower = 0; lower < rank; ++lower) before += !ranks[index(lower)].lost && !names(blamed, lower) ? 1 : 0;
  return before;
}

}  // namespace deep_ep::control
