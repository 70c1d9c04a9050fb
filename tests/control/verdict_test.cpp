// The verdict on ranks, as a function of the known facts: csrc/control/verdict.hpp.
#include "csrc/control/verdict.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace deep_ep::control
