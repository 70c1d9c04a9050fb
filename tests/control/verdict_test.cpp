// The verdict on ranks, as a function of the known facts: csrc/control/verdict.hpp.
#include "csrc/control/verdict.hpp"

#include <gtest/gtest.h>

namespace deep_ep::control {
namespace {

constexpr RankFacts kLives{};
constexpr RankFacts kLost{.lost = true, .silent = true};
constexpr RankFacts gave_up_on(int rank) { return {.gave_up_on = rank}; }

using Facts = std::vector<RankFacts>;
using Pairs = std::vector<RankPair>;
using Lost = std::vector<int>;

Lost ends(const Facts& ranks, const Pairs& failed = {}) { return ends_of_chains({ranks, {}, failed}); }

TEST(Verdict, AChainNamesTheRankAtItsEnd) {
  EXPECT_EQ(ends({gave_up_on(1), gave_up_on(2), gave_up_on(3), kLost, kLives}), (Lost{3, 3, 3, 3, kNobody}));
}

TEST(Verdict, WhatARankGaveUpOnBeforeItWasLostDoesNotMatter) {
  EXPECT_EQ(ends({RankFacts{.lost = true, .gave_up_on = 1}, kLives, gave_up_on(0)}), (Lost{0, kNobody, 0}));
}

TEST(Verdict, ACircleNamesItsLowestRankWhereverItIsEntered) {
  EXPECT_EQ(ends({gave_up_on(3), gave_up_on(2), gave_up_on(3), gave_up_on(1)}), (Lost{1, 1, 1, 1}));
  EXPECT_EQ(ends({gave_up_on(0), gave_up_on(0)}), (Lost{0, 0}));
}

/// Rank 1 could not write to rank 2, and waits for rank 3. Facts 2 and 3 wait for each other.
TEST(Verdict, AFailedQueuePairIsTheCauseOfACircle) {
  const Pairs failed{{1, 2}};
  EXPECT_EQ(ends({gave_up_on(3), gave_up_on(3), gave_up_on(3), gave_up_on(2)}, failed), (Lost{1, 1, 1, 1}));
  EXPECT_EQ(ends({kLives, kLives, gave_up_on(3), gave_up_on(2)}, failed), (Lost{kNobody, kNobody, 1, 1}))
      << "rank 1 goes on so far";
}

TEST(Verdict, AChainEndsWhereAQueuePairHasFailed) {
  const Pairs one{{1, 2}};
  EXPECT_EQ(ends({gave_up_on(1), gave_up_on(2), kLives}, one), (Lost{1, 1, kNobody}));
  EXPECT_EQ(ends({gave_up_on(1), gave_up_on(2), kLost}, one), (Lost{2, 2, 2}))
      << "a rank that is lost took the queue pair along";
  const Pairs most{{1, 2}, {0, 2}};
  EXPECT_EQ(ends({gave_up_on(2), gave_up_on(2), kLives, gave_up_on(1)}, most), (Lost{2, 2, kNobody, 2}));
}

constexpr RankFacts kSilent{.silent = true};
constexpr RankFacts kWaits{};

/// A rank that is lost, and the one whose report decided.
struct Blame {
  int rank, by;
  bool operator==(const Blame&) const = default;
};
using Blames = std::vector<Blame>;

Blames blames(const std::vector<LostRank>& lost, LostWhy why) {
  Blames found;
  for (const LostRank& one : lost) {
    EXPECT_EQ(one.why, why);
    found.push_back({one.rank, one.by});
  }
  return found;
}
Blames silent(const Facts& ranks, const Pairs& late) {
  return blames(silent_ranks({ranks, late, {}}), LostWhy::silent);
}

TEST(Silence, IsAVerdictOnlyWhereALivingRankHasWaitedTooLong) {
  EXPECT_EQ(silent({kWaits, kSilent, kSilent}, {}), Blames{});
  EXPECT_EQ(silent({kWaits, kSilent, kSilent}, {{0, 1}}), (Blames{{1, 0}}));
  EXPECT_EQ(silent({kLost, kSilent, kSilent}, {{0, 1}}), Blames{});
  EXPECT_EQ(silent({kWaits, RankFacts{.silent = true, .gave_up_on = 0}}, {{0, 1}}), Blames{});
}

TEST(Silence, IsNotTheFaultOfOneThatWaitsItself) {
  EXPECT_EQ(silent({kWaits, kWaits, kSilent}, {{0, 1}, {1, 2}}), (Blames{{2, 1}}));
  EXPECT_EQ(silent({kWaits, kWaits}, {{0, 1}, {1, 0}}), Blames{});
}

/// Its control thread may get no time to report that it waits on.
TEST(Silence, OfOneWhoseLastWordLeadsToAnotherSilentRankIsNoFault) {
  const auto last_waits_for = [](int rank) { return RankFacts{.silent = true, .waits_for = rank}; };
  const std::vector<RankPair> all{{0, 1}, {0, 2}, {0, 3}};
  EXPECT_EQ(silent({kWaits, last_waits_for(2), last_waits_for(3), kSilent}, all), (Blames{{3, 0}}));
  EXPECT_EQ(silent({kWaits, last_waits_for(2), kWaits, kSilent}, all), (Blames{{1, 0}, {3, 0}})) << "rank 2 reports";
  EXPECT_EQ(silent({kWaits, last_waits_for(2), kSilent, kLost}, {{0, 1}}), (Blames{{1, 0}})) << "nobody misses rank 2";
  EXPECT_EQ(silent({kWaits, last_waits_for(2), last_waits_for(1), kLost}, all), (Blames{{1, 0}, {2, 0}})) << "a circle";
}

TEST(Silence, IsBlamedOnce) {
  EXPECT_EQ(silent({kSilent, kWaits, kWaits, kWaits, kLost}, {{1, 0}, {2, 0}, {3, 0}, {1, 4}}), (Blames{{0, 1}}));
}

Blames failed(const Facts& ranks, const Pairs& pairs, PairEnd end = PairEnd::peer) {
  return blames(failed_ranks({ranks, {}, pairs}, end), LostWhy::failed);
}

TEST(FailedPairs, NameTheRankThatMostOfThemHaveInCommon) {
  const Facts four(4);
  EXPECT_EQ(failed(four, {{3, 0}, {3, 1}, {0, 3}}), (Blames{{3, 0}}));
  EXPECT_EQ(failed(four, {{0, 2}, {0, 3}, {0, 1}}), (Blames{{0, 0}})) << "nobody names it";
  EXPECT_EQ(failed(four, {{0, 2}}), (Blames{{2, 0}})) << "of two ends the one that is named";
  EXPECT_EQ(failed(four, {{2, 0}}, PairEnd::owner), (Blames{{2, 2}})) << "of two ends the one that names";
  EXPECT_EQ(failed(four, {{1, 2}, {2, 1}}), (Blames{{1, 2}})) << "of equal ones the lower";
  EXPECT_EQ(failed(four, {}), Blames{});
}

TEST(FailedPairs, LeaveNonePairBehindAndDoNotLoseMoreThanThat) {
  EXPECT_EQ(failed(Facts(6), {{0, 5}, {1, 5}, {2, 4}}), (Blames{{5, 0}, {4, 2}}));
  EXPECT_EQ(failed({kWaits, kWaits, kLost}, {{0, 2}, {1, 2}}), Blames{});
}

}  // namespace
}  // namespace deep_ep::control
