// Who is named when ranks wait for each other in vain: kernels/intranode/find_lost_rank.cu on CPU ranks.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <thread>

#include "csrc/executor/backend.hpp"
#include "kernels/common/lost_rank.hpp"
#include "kernels/intranode/params.hpp"
#include "tests/kernels/on_device.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

using Ranks = std::map<int, int>;

/// All ranks of `waits` (rank -> for whom it has waited) look for the lost one; something that ranks of `cut_off` have
/// sent got lost (rank -> to whom). Whom each of them names.
Ranks named_by(int num_ranks, const Ranks& waits, const Ranks& cut_off = {}) {
  const auto executor = make_host_executor({});
  const ControlWindow control(num_ranks, 1, 2);
  std::vector<std::byte*> heaps;
  std::vector<std::unique_ptr<OnDevice<std::byte>>> kept;
  for (int rank = 0; rank < num_ranks; ++rank) {
    kept.push_back(std::make_unique<OnDevice<std::byte>>(*executor, std::vector<std::byte>(control.bytes())));
    heaps.push_back(kept.back()->view(DType::uint8, {1}).as<std::byte>());
  }
  Ranks named;
  for (const auto& [rank, waited_for] : waits) named[rank] = -1;
  std::vector<std::thread> ranks;
  for (const auto& [rank, waited_for] : waits) {
    ranks.emplace_back([&, rank = rank, waited_for = waited_for] {
      LostRankParams params{};
      params.common.rank = rank;
      params.common.num_ranks = num_ranks;
      params.common.heaps = heaps.data();
      params.common.control = control;
      params.waited_for = waited_for;
      params.cut_off_from = cut_off.contains(rank) ? cut_off.at(rank) : device::kNotCutOff;
      params.for_ns = static_cast<std::uint64_t>(scaled(0.5) * 1e9);
      params.lost = &named[rank];
      const StreamHandle stream = executor->create_stream();
      dynamic_cast<Backend&>(*executor).kernels().find_lost_rank(params, {1, 32, 0}, stream);
      executor->synchronize(stream);
      executor->destroy_stream(stream);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return named;
}

TEST(LostRank, IsAtTheEndOfTheChain) {
  EXPECT_EQ(named_by(4, {{0, 3}, {1, 0}, {2, 1}}), (Ranks{{0, 3}, {1, 3}, {2, 3}}));
}

TEST(LostRank, IsTheOneThatTellsNothingWhereTheOthersWaitInACircle) {
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 2}, {2, 0}}), (Ranks{{0, 3}, {1, 3}, {2, 3}}));
}

/// What it has sent got lost, and it waits for an answer. Whoever tells nothing may have ended the call.
TEST(LostRank, IsTheOneThatIsCutOffWhereItIsInACircle) {
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 0}, {2, 1}}, {{0, 1}}), (Ranks{{0, 1}, {1, 0}, {2, 0}}));
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 0}, {2, 0}}, {{1, 0}}), (Ranks{{0, 1}, {1, 0}, {2, 1}}));
  EXPECT_EQ(named_by(4, {{0, 3}, {1, 0}, {2, 1}}, {{0, 1}}), (Ranks{{0, 3}, {1, 3}, {2, 3}})) << "but not in a chain";
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 0}, {2, 1}}, {{0, 0}}), (Ranks{{0, 1}, {1, 0}, {2, 0}})) << "its NIC is gone";
}

/// Whoever has posted to a process that is dead is cut off from it.
TEST(LostRank, IsTheDeadOneFromWhichOthersAreCutOff) {
  const Ranks circle = {{0, 1}, {1, 0}, {2, 1}};
  const Ranks right = {{0, 3}, {1, 3}, {2, 3}};
  EXPECT_EQ(named_by(4, circle, {{0, 3}, {1, 3}, {2, 3}}), right);
  EXPECT_EQ(named_by(4, circle, {{1, 3}, {2, 3}}), right);
  EXPECT_EQ(named_by(4, circle, {{2, 3}}), right) << "one that nobody in the circle has waited for";
  EXPECT_EQ(named_by(5, circle, {{0, 3}}), right) << "of two that tell nothing";
}

/// Others are cut off from it, and it from the first one that it has posted to, which may have ended the call.
TEST(LostRank, IsTheOneWhoseNicHasFailed) {
  const Ranks circle = {{0, 1}, {1, 0}, {2, 1}};
  EXPECT_EQ(named_by(4, circle, {{0, 1}, {1, 0}, {2, 0}}), (Ranks{{0, 1}, {1, 0}, {2, 0}}));
  EXPECT_EQ(named_by(4, circle, {{0, 3}, {1, 0}, {2, 0}}), (Ranks{{0, 1}, {1, 0}, {2, 0}}));
  EXPECT_EQ(named_by(4, circle, {{1, 0}, {2, 0}}), (Ranks{{0, 1}, {1, 0}, {2, 0}})) << "it has posted nothing";
}

/// Of a cable that is broken nobody can tell which end it is.
TEST(LostRank, IsOneOfTwoThatAreCutOffFromEachOther) {
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 0}, {2, 1}, {3, 1}}, {{0, 1}, {1, 0}}), (Ranks{{0, 1}, {1, 0}, {2, 0}, {3, 0}}));
}

TEST(LostRank, IsTheOneThatWasWaitedForWhereNobodyKnowsBetter) {
  EXPECT_EQ(named_by(5, {{0, 1}, {1, 0}, {2, 1}}), (Ranks{{0, 1}, {1, 0}, {2, 1}}));
  EXPECT_EQ(named_by(3, {{0, 2}}), (Ranks{{0, 2}}));
}

}  // namespace
}  // namespace deep_ep::test
