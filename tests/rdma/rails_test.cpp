// Fabrics that connect rails only: who tries to reach whom, and how a refusal becomes one text on all ranks.
#include "csrc/rdma/rails.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 6;
constexpr int kWidth = 3;

/// How a fabric is, and what was done on it.
struct Fabric {
  bool routes = true;   ///< between rails
  int unanswered = -1;  ///< what this rank sends to other rails gets no answer
  std::mutex mutex;
  std::set<std::pair<int, int>> reached;
};

class FabricPaths final : public rdma::Paths {
 public:
  FabricPaths(Fabric& fabric, int rank, std::size_t count) : fabric_(fabric), rank_(rank), peers_(count, -1) {}
  rdma::QueuePairAddress address(std::size_t path) const override {
    return {.queue_pair = static_cast<std::uint32_t>(100 * rank_) + static_cast<std::uint32_t>(path),
            .lid = static_cast<std::uint16_t>(rank_)};
  }
  void connect(std::size_t path, const rdma::QueuePairAddress& peer) override {
    // The path at the other side leads back: it is of this rank's rail, and of the other kind.
    const bool to_next = path < kWidth;
    const auto back = static_cast<std::uint32_t>(to_next ? kWidth + rank_ % kWidth : rank_ % kWidth);
    if (peer.queue_pair != 100u * peer.lid + back || peer.lid % kWidth != static_cast<int>(path) % kWidth) {
      throw std::runtime_error("another path");
    }
    if (!fabric_.routes) throw SystemError("no route to the peer");
    peers_[path] = peer.lid;
  }
  void reach(std::size_t path) override {
    if (rank_ == fabric_.unanswered) throw SystemError("a write is not answered");
    const std::lock_guard lock(fabric_.mutex);
    fabric_.reached.insert({rank_, peers_.at(path)});
  }

 private:
  Fabric& fabric_;
  int rank_;
  std::vector<int> peers_;
};

/// The reason, which is the same on all ranks.
std::string reason(Fabric& fabric) {
  std::vector<std::string> said(kRanks);
  expect_ranks_succeed(kRanks, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    said[static_cast<std::size_t>(rank)] = rdma::why_unreached(
        *bootstrap, kWidth, [&](std::size_t count) { return std::make_unique<FabricPaths>(fabric, rank, count); });
  });
  EXPECT_EQ(std::ranges::count(said, said[0]), kRanks);
  return said[0];
}

TEST(RailsTest, EveryRankTriesTheOtherRailsOfTheNextNode) {
  Fabric fabric;
  EXPECT_EQ(reason(fabric), "");
  std::set<std::pair<int, int>> expected;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int peer = 0; peer < kRanks; ++peer) {
      if (rank / kWidth != peer / kWidth && rank % kWidth != peer % kWidth) expected.insert({rank, peer});
    }
  }
  EXPECT_EQ(fabric.reached, expected);
}

TEST(RailsTest, AMissingRouteIsNamed) {
  Fabric fabric;
  fabric.routes = false;
  EXPECT_TRUE(contains(reason(fabric), "rank 0 (rail 0, GID "));
  EXPECT_TRUE(contains(reason(fabric), "does not reach rank 4 (rail 1, GID "));
  EXPECT_TRUE(contains(reason(fabric), "no route to the peer"));
  EXPECT_TRUE(fabric.reached.empty()) << "nothing is sent where connecting has failed";
}

TEST(RailsTest, AWriteWithoutAnAnswerIsNamed) {
  Fabric fabric;
  fabric.unanswered = 4;
  const std::string text = reason(fabric);
  EXPECT_TRUE(contains(text, "rank 4 (rail 1, GID ")) << text;
  EXPECT_TRUE(contains(text, "does not reach rank 0 (rail 0, GID ")) << text;
  EXPECT_TRUE(contains(text, "a write is not answered")) << text;
}

}  // namespace
}  // namespace deep_ep::test
