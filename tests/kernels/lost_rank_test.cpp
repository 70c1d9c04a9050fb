// Who is named when ranks wait for each other in vain: kernels/intranode/find_lost_rank.cu on CPU ranks.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <thread>

#include "csrc/executor/backend.hpp"
#include "kernels/intranode/params.hpp"
#include "tests/kernels/on_device.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

/// All ranks of `waits` (rank -> for whom it has waited) look for the lost one; what `cut_off` has sent got lost. Whom
/// each of them names.
std::map<int, int> named_by(int num_ranks, const std::map<int, int>& waits, int cut_off = -1) {
  const auto executor = make_host_executor({});
  const ControlWindow control(num_ranks, 1, 2);
  std::vector<std::byte*> heaps;
  std::vector<std::unique_ptr<OnDevice<std::byte>>> kept;
  for (int rank = 0; rank < num_ranks; ++rank) {
    kept.push_back(std::make_unique<OnDevice<std::byte>>(*executor, std::vector<std::byte>(control.bytes())));
    heaps.push_back(kept.back()->view(DType::uint8, {1}).as<std::byte>());
  }
  std::map<int, int> named;
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
      params.cut_off = rank == cut_off;
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

using Ranks = std::map<int, int>;

TEST(LostRank, IsAtTheEndOfTheChain) {
  EXPECT_EQ(named_by(4, {{0, 3}, {1, 0}, {2, 1}}), (Ranks{{0, 3}, {1, 3}, {2, 3}}));
}

TEST(LostRank, IsTheOneThatTellsNothingWhereTheOthersWaitInACircle) {
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 2}, {2, 0}}), (Ranks{{0, 3}, {1, 3}, {2, 3}}));
}

/// What it has sent got lost, and it waits for an answer. Whoever tells nothing may have ended the call.
TEST(LostRank, IsTheOneThatIsCutOffWhereItIsInACircle) {
  EXPECT_EQ(named_by(4, {{0, 1}, {1, 0}, {2, 1}}, 0), (Ranks{{0, 1}, {1, 0}, {2, 0}}));
  EXPECT_EQ(named_by(4, {{0, 3}, {1, 0}, {2, 1}}, 0), (Ranks{{0, 3}, {1, 3}, {2, 3}})) << "but not in a chain";
}

TEST(LostRank, IsTheOneThatWasWaitedForWhereNobodyKnowsBetter) {
  EXPECT_EQ(named_by(5, {{0, 1}, {1, 0}, {2, 1}}), (Ranks{{0, 1}, {1, 0}, {2, 1}}));
  EXPECT_EQ(named_by(3, {{0, 2}}), (Ranks{{0, 2}}));
}

}  // namespace
}  // namespace deep_ep::test
