// The verdict on ranks, as a function of the known facts: csrc/control/verdict.hpp.
#include "csrc/control/verdict.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace deep_ep::control {
namespace {

constexpr RankFacts kLives{};
constexpr RankFacts kGone{.gone = true};
constexpr RankFacts gave_up_on(int rank) { return {.gave_up_on = rank}; }

std::vector<int> judged(const std::vector<RankFacts>& ranks) { return judge(ranks); }
using Lost = std::vector<int>;

TEST(Verdict, NobodyIsLostWhereNothingIsKnown) {
  EXPECT_EQ(judged({kLives, kLives, kLives}), (Lost{kNobody, kNobody, kNobody}));
  EXPECT_EQ(judged({}), Lost{});
}

TEST(Verdict, ARankWhoseProcessHasEndedIsLost) {
  EXPECT_EQ(judged({kLives, kGone, kLives}), (Lost{kNobody, 1, kNobody}));
}

TEST(Verdict, AChainNamesTheRankAtItsEnd) {
  EXPECT_EQ(judged({gave_up_on(1), gave_up_on(2), gave_up_on(3), kGone, kLives}), (Lost{3, 3, 3, 3, kNobody}));
}

TEST(Verdict, EachOfSeveralDeathsEndsItsOwnChains) {
  EXPECT_EQ(judged({kGone, gave_up_on(0), kLives, gave_up_on(4), kGone}), (Lost{0, 0, kNobody, 4, 4}));
}

TEST(Verdict, WhatARankGaveUpOnBeforeItDiedDoesNotMatter) {
  EXPECT_EQ(judged({RankFacts{.gone = true, .gave_up_on = 1}, kLives, gave_up_on(0)}), (Lost{0, kNobody, 0}));
}

TEST(Verdict, AReportMayComeBeforeTheDeathThatItIsAbout) {
  EXPECT_EQ(judged({gave_up_on(2), kLives, kLives}), (Lost{2, kNobody, kNobody}));
  EXPECT_EQ(judged({gave_up_on(2), kLives, kGone}), (Lost{2, kNobody, 2}));
}

TEST(Verdict, ACircleNamesItsLowestRankWhereverItIsEntered) {
  EXPECT_EQ(judged({gave_up_on(3), gave_up_on(2), gave_up_on(3), gave_up_on(1)}), (Lost{1, 1, 1, 1}));
  EXPECT_EQ(judged({gave_up_on(0), gave_up_on(0)}), (Lost{0, 0}));
}

TEST(Verdict, ANumberThatIsNoRankSaysNothing) {
  EXPECT_EQ(judged({gave_up_on(7), gave_up_on(-5), gave_up_on(3)}), (Lost{kNobody, kNobody, kNobody}));
}

TEST(Verdict, RandomFactsNameTheEndOfTheChain) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<RankFacts> ranks(1 + random() % 9);
    for (RankFacts& facts : ranks) {
      facts.gone = random() % 4 == 0;
      if (random() % 2 == 0) facts.gave_up_on = static_cast<int>(random() % ranks.size());
    }
    const Lost lost = judge(ranks);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const RankFacts& facts = ranks[rank];
      EXPECT_EQ(lost[rank] != kNobody, facts.gone || facts.gave_up_on != kNobody);
      if (facts.gone) {
        EXPECT_EQ(lost[rank], static_cast<int>(rank));
      }
      if (facts.gone || facts.gave_up_on == kNobody) continue;
      // A rank names whom the next one in the chain names, or that one itself if the chain ends there.
      const auto next = static_cast<std::size_t>(facts.gave_up_on);
      EXPECT_EQ(lost[rank], lost[next] == kNobody ? facts.gave_up_on : lost[next]);
    }
  }
}

TEST(Verdict, ASilentRankEndsAChainAsAGoneOneDoes) {
  EXPECT_EQ(judged({gave_up_on(1), RankFacts{.silent = true, .gave_up_on = 2}, kLives}), (Lost{1, 1, kNobody}));
}

/// Rank 1 could not write to rank 2, and waits for rank 3. Ranks 2 and 3 wait for each other.
TEST(Verdict, AFailedQueuePairIsTheCauseOfACircle) {
  const std::vector<RankFacts> ranks{gave_up_on(3), gave_up_on(3), gave_up_on(3), gave_up_on(2)};
  EXPECT_EQ(judge(ranks, std::vector<RankPair>{{1, 2}}), (Lost{1, 1, 1, 1}));
  const std::vector<RankFacts> early{kLives, kLives, gave_up_on(3), gave_up_on(2)};
  EXPECT_EQ(judge(early, std::vector<RankPair>{{1, 2}}), (Lost{kNobody, kNobody, 1, 1})) << "rank 1 goes on so far";
  const std::vector<RankFacts> others{kLives, kLives, kLives, gave_up_on(4), gave_up_on(3)};
  EXPECT_EQ(judge(others, std::vector<RankPair>{{1, 2}}), (Lost{kNobody, kNobody, kNobody, 1, 1}));
}

TEST(Verdict, OfSeveralFailedPairsTheNearestToTheCircleCounts) {
  const std::vector<RankFacts> ranks{kLives, kLives, gave_up_on(3), gave_up_on(2), kLives};
  EXPECT_EQ(judge(ranks, std::vector<RankPair>{{0, 1}, {4, 3}}), (Lost{kNobody, kNobody, 4, 4, kNobody}));
  EXPECT_EQ(judge(ranks, std::vector<RankPair>{{2, 0}, {0, 1}}), (Lost{kNobody, kNobody, 0, 0, kNobody}));
}

TEST(Verdict, AChainEndsWhereAQueuePairHasFailed) {
  const std::vector<RankPair> one{{1, 2}};
  EXPECT_EQ(judge(std::vector{gave_up_on(1), gave_up_on(1), kLives}, one), (Lost{1, 1, kNobody}));
  EXPECT_EQ(judge(std::vector{gave_up_on(1), gave_up_on(2), kLives}, one), (Lost{1, 1, kNobody}));
  const std::vector<RankPair> most{{1, 2}, {0, 2}};
  EXPECT_EQ(judge(std::vector{gave_up_on(0), gave_up_on(1), kLives, gave_up_on(1)}, most), (Lost{2, 2, kNobody, 2}));
  EXPECT_EQ(judge(std::vector{gave_up_on(0), gave_up_on(1), kGone, gave_up_on(1)}, one), (Lost{0, 2, 2, 2}))
      << "a process that has ended took the queue pair along; rank 0 has ended by itself";
}

TEST(Verdict, OneCircleHasOneCauseThoughSeveralOfItsRanksHaveFailedPairs) {
  const std::vector<RankFacts> ranks{gave_up_on(1), gave_up_on(2), gave_up_on(0), gave_up_on(0)};
  EXPECT_EQ(judge(ranks, std::vector<RankPair>{{1, 3}, {2, 0}}), (Lost{1, 1, 1, 1}));
}

/// Half of 128 ranks have lost their NICs.
TEST(Verdict, ManyFailedPairsNameOneRankEach) {
  constexpr int kRanks = 128;
  std::vector<RankFacts> ranks;
  std::vector<RankPair> failed;
  Lost expected;
  for (int rank = 0; rank < kRanks; ++rank) {
    const bool has_lost = rank % 2 != 0;
    ranks.push_back(gave_up_on(rank ^ 1));
    for (int peer = 0; has_lost && peer < kRanks; peer += 2) failed.push_back({rank, peer});
    expected.push_back(rank | 1);
  }
  EXPECT_EQ(judge(ranks, failed), expected);
}

TEST(Verdict, RandomFailuresHaveOneCauseWhereverOneStarts) {
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<RankFacts> ranks(2 + random() % 8);
    const auto some = [&] { return static_cast<int>(random() % ranks.size()); };
    for (RankFacts& facts : ranks) {
      facts.gone = random() % 8 == 0;
      if (random() % 4 != 0) facts.gave_up_on = some();
    }
    std::vector<RankPair> failed;
    for (int i = 0; i < 4; ++i) failed.push_back({some(), some()});
    const Lost lost = judge(ranks, failed);
    std::ranges::shuffle(failed, random);
    EXPECT_EQ(judge(ranks, failed), lost) << "in another order";
    const auto next_of = [&](int rank) {
      const RankFacts& facts = ranks[static_cast<std::size_t>(rank)];
      return facts.gone ? kNobody : facts.gave_up_on;
    };
    for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
      const int next = next_of(rank);
      if (next == kNobody) continue;
      int at = next;
      for (std::size_t steps = 0; steps < ranks.size() && at != rank && at != kNobody; ++steps) at = next_of(at);
      const bool on_a_circle = at == rank;
      const bool ends_here = std::ranges::find(failed, rank, &RankPair::rank) != failed.end();
      const int of_next = lost[static_cast<std::size_t>(next)];
      if (on_a_circle || !ends_here) {
        EXPECT_EQ(lost[static_cast<std::size_t>(rank)], of_next == kNobody ? next : of_next) << round;
      }
    }
  }
}

constexpr RankSigns kSilent{.silent = true};
constexpr RankSigns kWaits{};
constexpr RankSigns kLost{.lost = true, .silent = true};
using Blames = std::vector<Blame>;

Blames silent(const std::vector<RankSigns>& ranks, const std::vector<RankPair>& waits) {
  return silent_ranks(ranks, waits);
}

TEST(Silence, IsAVerdictOnlyWhereALivingRankHasWaitedTooLong) {
  EXPECT_EQ(silent({kWaits, kSilent, kSilent}, {}), Blames{});
  EXPECT_EQ(silent({kWaits, kSilent, kSilent}, {{0, 1}}), (Blames{{1, 0}}));
  EXPECT_EQ(silent({kLost, kSilent, kSilent}, {{0, 1}}), Blames{});
  EXPECT_EQ(silent({kWaits, kSilent}, {{1, 1}}), Blames{});
}

TEST(Silence, IsNotTheFaultOfOneThatWaitsItself) {
  EXPECT_EQ(silent({kWaits, kWaits, kSilent}, {{0, 1}, {1, 2}}), (Blames{{2, 1}}));
  EXPECT_EQ(silent({kWaits, kWaits}, {{0, 1}, {1, 0}}), Blames{});
}

/// Its control thread may get no time to report that it waits on.
TEST(Silence, OfOneWhoseLastWordLeadsToAnotherSilentRankIsNoFault) {
  const auto last_waits_for = [](int rank) { return RankSigns{.silent = true, .waits_for = rank}; };
  const std::vector<RankPair> all{{0, 1}, {0, 2}, {0, 3}};
  EXPECT_EQ(silent({kWaits, last_waits_for(2), last_waits_for(3), kSilent}, all), (Blames{{3, 0}}));
  EXPECT_EQ(silent({kWaits, last_waits_for(2), kWaits, kSilent}, all), (Blames{{1, 0}, {3, 0}})) << "rank 2 reports";
  EXPECT_EQ(silent({kWaits, last_waits_for(2), kSilent, kLost}, {{0, 1}}), (Blames{{1, 0}})) << "nobody misses rank 2";
  EXPECT_EQ(silent({kWaits, last_waits_for(2), last_waits_for(1), kLost}, all), (Blames{{1, 0}, {2, 0}})) << "a circle";
}

TEST(Silence, IsBlamedOnceByTheLowestRankThatWaits) {
  EXPECT_EQ(silent({kSilent, kWaits, kWaits, kWaits, kLost}, {{2, 0}, {1, 0}, {3, 0}, {1, 4}}), (Blames{{0, 1}}));
}

Blames unreachable(std::size_t ranks, const std::vector<RankPair>& pairs) {
  return unreachable_ranks(std::vector<RankSigns>(ranks), pairs);
}

TEST(FailedPairs, NameTheRankThatMostOfThemHaveInCommon) {
  EXPECT_EQ(unreachable(4, {{3, 0}, {3, 1}, {0, 3}}), (Blames{{3, 0}}));
  EXPECT_EQ(unreachable(4, {{0, 2}, {0, 3}, {0, 1}}), (Blames{{0, 0}})) << "nobody names it";
  EXPECT_EQ(unreachable(3, {{0, 2}}), (Blames{{2, 0}})) << "of two ends the one that is named";
  EXPECT_EQ(unreachable(3, {{0, 1}, {1, 0}}), (Blames{{1, 0}})) << "of equal ones the higher";
  EXPECT_EQ(unreachable(3, {}), Blames{});
}

TEST(FailedPairs, LeaveNonePairBehindAndDoNotLoseMoreThanThat) {
  EXPECT_EQ(unreachable(6, {{0, 5}, {1, 5}, {2, 4}}), (Blames{{5, 0}, {4, 2}}));
  const std::vector<RankSigns> ranks{kWaits, kWaits, kLost};
  EXPECT_EQ(unreachable_ranks(ranks, std::vector<RankPair>{{0, 2}, {1, 2}}), Blames{});
}

TEST(DecidingRank, IsTheLowestThatGoesOn) {
  const std::vector<RankSigns> ranks{kLost, kWaits, kWaits};
  EXPECT_EQ(deciders_before(1, ranks, {}), 0);
  EXPECT_EQ(deciders_before(2, ranks, {}), 1);
  EXPECT_EQ(deciders_before(2, ranks, Blames{{1, 2}}), 0);
}

}  // namespace
}  // namespace deep_ep::control
