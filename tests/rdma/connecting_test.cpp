// What all ranks do when a device of one of them refuses to connect.
#include "csrc/rdma/connecting.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::test {
namespace {

using rdma::NicHandler;

/// Ends of no device; `refusal` is what connecting throws.
class FakeEnds final : public rdma::Ends {
 public:
  FakeEnds(bool by_kernels, std::function<void()> refusal) : by_kernels_(by_kernels), refusal_(std::move(refusal)) {}

  rdma::QueuePairAddress address(std::size_t) const override { return {.queue_pair = by_kernels_ ? 1U : 2U}; }
  RdmaPeerParams connect(std::size_t, const rdma::QueuePairAddress& peer) override {
    if (refusal_) refusal_();
    RdmaPeerParams params;
    params.queue.number = peer.queue_pair;
    return params;
  }
  bool rung_by_kernels() const override { return by_kernels_; }
  void start() override {}
  std::optional<rdma::Failure> failure() const override { return {}; }
  bool idle() const override { return true; }
  std::string describe() const override { return by_kernels_ ? "gpu" : "cpu"; }

 private:
  bool by_kernels_;
  std::function<void()> refusal_;
};

struct ConnectingCase {
  std::vector<NicHandler> wanted;  ///< of each rank
  int refused = -1;                ///< the rank whose device refuses kernels' ends
  std::function<void()> refusal = [] { throw SystemError("INIT2RTR_QP: syndrome 0x764216"); };
};

/// What each rank got, "gpu to the peer's 1", or threw.
std::vector<std::string> connect(const ConnectingCase& given) {
  const auto ranks = static_cast<int>(given.wanted.size());
  std::vector<std::string> results(given.wanted.size());
  const auto errors = run_rank_threads(ranks, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const NicHandler wanted = given.wanted[static_cast<std::size_t>(rank)];
    const int peer = rank < 2 ? 1 - rank : -1;  // further ranks reach nobody
    const auto make = [&](NicHandler handler) -> std::unique_ptr<rdma::Ends> {
      if (peer < 0) return nullptr;
      const bool by_kernels = handler != NicHandler::cpu;
      return std::make_unique<FakeEnds>(by_kernels, by_kernels && rank == given.refused ? given.refusal : nullptr);
    };
    const rdma::ConnectionOptions options{.peers = peer < 0 ? std::vector<int>{} : std::vector<int>{peer}};
    const auto connected = rdma::make_connected_ends(*bootstrap, options, wanted, true, make);
    results[static_cast<std::size_t>(rank)] =
        peer < 0 ? "nobody"
                 : connected.ends->describe() + " to the peer's " +
                       std::to_string(connected.peers[static_cast<std::size_t>(peer)].queue.number);
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    if (!errors[rank].empty()) results[rank] = errors[rank];
  }
  return results;
}

using Results = std::vector<std::string>;
constexpr NicHandler kAny = NicHandler::automatic;

TEST(ConnectingTest, AutoFallsBackOnAllRanksAlike) {
  EXPECT_EQ(connect({{kAny, kAny, kAny}}), (Results{"gpu to the peer's 1", "gpu to the peer's 1", "nobody"}));
  EXPECT_EQ(connect({{kAny, kAny, kAny}, 1}), (Results{"cpu to the peer's 2", "cpu to the peer's 2", "nobody"}));
  EXPECT_EQ(connect({{NicHandler::gpu, kAny, kAny}, 1}),
            (Results{"gpu to the peer's 2", "cpu to the peer's 1", "nobody"}))
      << "a rank that insists keeps its handler, with new queue pairs";
}

TEST(ConnectingTest, NothingElseIsTriedWhereThatHelpsNobody) {
  for (const std::string& text : connect({{kAny, NicHandler::gpu}, 1})) {
    EXPECT_TRUE(contains(text, "syndrome 0x764216")) << text;
  }
  for (const std::string& text : connect({{kAny, kAny}, 1, [] { throw RankMismatch("other fabrics"); }})) {
    EXPECT_TRUE(contains(text, "other fabrics")) << "no handler would connect these";
  }
}

}  // namespace
}  // namespace deep_ep::test
