// Fabrics that connect rails only: who tries to reach whom, and how a refusal becomes one text on all ranks.
#include "csrc/rdma/connecting.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 12;
constexpr int kWidth = 3;
constexpr int kNodes = kRanks / kWidth;

/// How a fabric is, and what was done on it.
struct Fabric {
  bool routes = true;   ///< between rails
  int unanswered = -1;  ///< what this rank sends to other rails gets no answer
  std::mutex mutex;
  std::set<std::pair<int, int>> reached;
};

class FabricEnds final : public rdma::Ends {
 public:
  FabricEnds(Fabric& fabric, rdma::ConnectionOptions options) : fabric_(fabric), options_(std::move(options)) {}
  rdma::QueuePairAddress address(std::size_t end) const override { return address(options_.rank, options_.peer(end)); }
  RdmaPeerParams connect(std::size_t end, const rdma::QueuePairAddress& peer) override {
    const auto expected = address(options_.peer(end), options_.rank);
    if (peer.queue_pair != expected.queue_pair || peer.lid != expected.lid) throw std::runtime_error("another path");
    if (!fabric_.routes) throw SystemError("no route to the peer");
    RdmaPeerParams params;
    params.signal_key = peer.queue_pair;
    return params;
  }
  void reach(std::size_t end, const RdmaPeerParams& params) override {
    if (options_.rank == fabric_.unanswered) throw SystemError("a write is not answered");
    if (params.signal_key != address(options_.peer(end), options_.rank).queue_pair) throw std::runtime_error("not it");
    const std::lock_guard lock(fabric_.mutex);
    fabric_.reached.insert({options_.rank, options_.peer(end)});
  }
  void start() override { throw std::runtime_error("it only tries"); }
  std::string describe() const override { return {}; }
  std::optional<rdma::Failure> executor_failure() const override { return {}; }

 private:
  static rdma::QueuePairAddress address(int rank, int peer) {
    return {.queue_pair = static_cast<std::uint32_t>(100 * rank + peer), .lid = static_cast<std::uint16_t>(rank)};
  }

  Fabric& fabric_;
  rdma::ConnectionOptions options_;
};

/// The reason, which is the same on all ranks.
std::string reason(Fabric& fabric) {
  std::vector<std::string> said(kRanks);
  expect_ranks_succeed(kRanks, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const auto make = [&](rdma::NicHandler, const rdma::ConnectionOptions& options) {
      return std::make_unique<FabricEnds>(fabric, options);
    };
    said[static_cast<std::size_t>(rank)] = rdma::why_unreached(*bootstrap, kWidth, /*by_landings=*/false, make);
  });
  EXPECT_EQ(std::ranges::count(said, said[0]), kRanks);
  return said[0];
}

TEST(RailsTest, EveryRankTriesTheOtherRailsOfItsNeighbours) {
  Fabric fabric;
  EXPECT_EQ(reason(fabric), "");
  std::set<std::pair<int, int>> expected;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int peer = 0; peer < kRanks; ++peer) {
      const int nodes = (peer / kWidth - rank / kWidth + kNodes) % kNodes;
      if ((nodes == 1 || nodes == kNodes - 1) && rank % kWidth != peer % kWidth) expected.insert({rank, peer});
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
