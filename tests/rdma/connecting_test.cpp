// What all ranks do when a device of one of them refuses to connect.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/rdma/connections.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::test {
namespace {

using rdma::NicHandler;

/// Ends of no device. Without functions of their own, all have the same address and connect to any.
struct FakeEnds final : rdma::Ends {
  using Address = std::function<rdma::QueuePairAddress(std::size_t end)>;
  using Connect = std::function<void(std::size_t end, const rdma::QueuePairAddress& peer)>;

  rdma::QueuePairAddress address(std::size_t end) const override {
    return own ? own(end) : rdma::QueuePairAddress{.queue_pair = static_cast<std::uint32_t>(by)};
  }
  RdmaQueuePair connect(std::size_t end, const rdma::QueuePairAddress& peer) override {
    if (connected) connected(end, peer);
    RdmaQueuePair params;
    params.number = peer.queue_pair;
    return params;
  }
  rdma::QueuePairAddress landing(std::size_t end) const override { return landing_of(end); }
  void connect_landing(std::size_t end, const rdma::QueuePairAddress& peer) override { landed(end, peer); }
  NicHandler handler() const override { return by; }
  void reach(std::size_t end, const rdma::QueuePairAddress& peer) override { reached(end, peer.queue_pair); }
  void start() override {}
  std::string describe() const override { return std::string(name_of(by)); }
  std::string executor_failure() const override { return {}; }

  NicHandler by = NicHandler::cpu;
  Address own, landing_of;
  Connect connected, landed;
  std::function<void(std::size_t end, std::uint32_t number)> reached;
};

struct ConnectingCase {
  std::vector<NicHandler> wanted;                ///< of each rank
  int refused = -1;                              ///< the rank whose device refuses to connect ends,
  NicHandler slowest_refused = NicHandler::gpu;  ///< up to those of this handler
  int slow = -1;                                 ///< the rank on which `gpu` is impossible
};

/// Of each rank: "gpu to the peer's gpu", or its error.
std::vector<std::string> connect(const ConnectingCase& given) {
  const auto ranks = static_cast<int>(given.wanted.size());
  std::vector<std::string> results(given.wanted.size());
  const auto errors = run_rank_threads(ranks, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const NicHandler wanted = given.wanted[static_cast<std::size_t>(rank)];
    const int peer = rank < 2 ? 1 - rank : -1;  // further ranks reach nobody
    const auto make = [&](NicHandler handler, const rdma::ConnectionOptions&) {
      // Whatever the GPU answers.
      if (rank == given.slow && handler == NicHandler::gpu) throw OutOfMemory("cudaHostRegister: out of memory");
      auto ends = std::make_unique<FakeEnds>();
      ends->by = handler;
      if (rank == given.refused && handler <= given.slowest_refused) {
        ends->connected = [](std::size_t, const rdma::QueuePairAddress&) {
          throw SystemError("INIT2RTR_QP: syndrome 0x764216");
        };
      }
      return ends;
    };
    const rdma::ConnectionOptions options{.peers = peer < 0 ? std::vector<int>{} : std::vector<int>{peer}};
    BufferExchanges exchanges(bootstrap);
    rdma::ConnectedEnds connected;
    exchanges.agree("connecting", [&] {
      connected = std::move(rdma::make_connected_ends(exchanges, std::array{options}, wanted, true, make).front());
      exchanges.barrier();
    });
    if (peer < 0) return void(results[static_cast<std::size_t>(rank)] = "nobody");
    const auto number = connected.params.at(0).number;
    results[static_cast<std::size_t>(rank)] =
        fmt::format("{} to the peer's {}", connected.ends->describe(), name_of(static_cast<NicHandler>(number)));
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    if (!errors[rank].empty()) results[rank] = errors[rank];
  }
  return results;
}

using Results = std::vector<std::string>;
constexpr NicHandler kAny = NicHandler::automatic;

Results both(const std::string& handler) {
  const std::string text = handler + " to the peer's " + handler;
  return {text, text, "nobody"};
}

TEST(ConnectingTest, AutoIsTheFastestThatWorksOnAllRanks) {
  EXPECT_EQ(connect({{kAny, kAny, kAny}}), both("gpu"));
  EXPECT_EQ(connect({.wanted = {kAny, kAny, kAny}, .slow = 1}), both("doorbell"));
  EXPECT_EQ(connect({.wanted = {NicHandler::gpu, kAny, kAny}, .slow = 1}),
            (Results{"gpu to the peer's doorbell", "doorbell to the peer's gpu", "nobody"}))
      << "a rank that insists keeps its handler";
}

TEST(ConnectingTest, AutoFallsBackOnAllRanksAlike) {
  EXPECT_EQ(connect({{kAny, kAny, kAny}, 1}), both("doorbell"));
  EXPECT_EQ(connect({{kAny, kAny, kAny}, 1, NicHandler::doorbell}), both("cpu"));
  EXPECT_EQ(connect({.wanted = {kAny, kAny, kAny}, .refused = 0, .slowest_refused = NicHandler::doorbell, .slow = 1}),
            both("cpu"));
  EXPECT_EQ(connect({{NicHandler::gpu, kAny, kAny}, 1, NicHandler::doorbell}),
            (Results{"gpu to the peer's cpu", "cpu to the peer's gpu", "nobody"}))
      << "a rank that insists keeps its handler, with new queue pairs";
}

TEST(ConnectingTest, OneWarningSaysWhyNoFasterHandler) {
  if (std::getenv("DEEP_EP_LOG") != nullptr || std::getenv("DEEP_EP_LOG_FILE") != nullptr) {
    GTEST_SKIP() << "the log goes elsewhere, or is turned down";
  }
  testing::internal::CaptureStderr();
  connect({.wanted = {kAny, kAny}, .refused = 0, .slowest_refused = NicHandler::doorbell, .slow = 1});
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(),
                       "RDMA: a CPU thread executes what kernels post (DEEP_EP_NIC_HANDLER=cpu), because: rank 1: "
                       "cudaHostRegister: out of memory; rank 0: INIT2RTR_QP: syndrome 0x764216"));
}

TEST(ConnectingTest, NothingElseIsTriedWhereThatHelpsNobody) {
  for (const std::string& text : connect({{kAny, NicHandler::gpu}, 1})) {
    EXPECT_TRUE(contains(text, "syndrome 0x764216")) << text;
  }
  for (const std::string& text : connect({{kAny, kAny}, 1, NicHandler::cpu})) {
    EXPECT_TRUE(contains(text, "syndrome 0x764216")) << text;
  }
}

/// A number that no other end has.
std::uint32_t number(std::size_t set, int rank, int channel, int peer) {
  return static_cast<std::uint32_t>(1000 * (set + 1)) + static_cast<std::uint32_t>(100 * rank + 20 * channel + peer);
}

void require_address(const rdma::QueuePairAddress& address, std::uint32_t queue_pair, std::uint32_t key) {
  if (address.queue_pair != queue_pair || address.heap_key != key) throw std::runtime_error("another other side");
}

TEST(ConnectingTest, EveryEndLearnsOfTheOneAtItsOtherSide) {
  // Rank 1 is reached by all, ranks 0 and 2 do not reach each other, rank 3 reaches nobody. The other set is a ring.
  const std::vector<std::vector<int>> star = {{1}, {2, 0}, {1}, {}};
  expect_ranks_succeed(4, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const std::array sets{
        rdma::ConnectionOptions{.peers = star[static_cast<std::size_t>(rank)], .channels = 3},
        rdma::ConnectionOptions{.peers = {(rank + 1) % 4, (rank + 3) % 4}, .channels = 2},
    };
    int connected = 0;
    const auto make = [&](NicHandler, const rdma::ConnectionOptions& options) {
      const std::size_t set = options.channels == 3 ? 0 : 1;
      auto ends = std::make_unique<FakeEnds>();
      ends->own = [=](std::size_t end) -> rdma::QueuePairAddress {
        return {.queue_pair = number(set, rank, options.channel(end), options.peer(end)),
                .heap_key = 7 * static_cast<std::uint32_t>(rank)};
      };
      ends->connected = [=, &connected](std::size_t end, const rdma::QueuePairAddress& peer) {
        const int other = options.peer(end);
        require_address(peer, number(set, other, options.channel(end), rank), 7 * static_cast<std::uint32_t>(other));
        ++connected;
      };
      return ends;
    };
    const auto made = rdma::make_connected_ends(*bootstrap, sets, kAny, false, make);
    if (connected != static_cast<int>(sets[0].ends() + sets[1].ends())) throw std::runtime_error("not every end");
    if ((made[0].ends == nullptr) != sets[0].peers.empty()) throw std::runtime_error("ends to nobody");
  });
}

TEST(ConnectingTest, WhereRailsAloneAreConnectedOthersAreReachedByLandings) {
  expect_ranks_succeed(4, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const int other_node = rank < 2 ? 2 : 0;
    const std::array sets{
        rdma::ConnectionOptions{.rank = rank, .peers = {other_node + 1, other_node}, .channels = 3, .rail_width = 2}};
    int connected = 0;
    int landed = 0;
    const auto make = [&](NicHandler, const rdma::ConnectionOptions& options) {
      // Numbers of landings are those of ends and 500; their key says on which rail they are.
      const auto to = [=](std::size_t end) { return number(0, rank, options.channel(end), options.peer(end)); };
      const auto from = [=](std::size_t end) { return number(0, options.peer(end), options.channel(end), rank); };
      const auto key_of = [=](int other) { return 70 + static_cast<std::uint32_t>(options.rail_of(other)); };
      auto ends = std::make_unique<FakeEnds>();
      ends->own = [=](std::size_t end) -> rdma::QueuePairAddress { return {.queue_pair = to(end)}; };
      ends->landing_of = [=](std::size_t end) -> rdma::QueuePairAddress {
        return {.queue_pair = 500 + to(end), .heap_key = key_of(options.peer(end))};
      };
      ends->connected = [=, &connected](std::size_t end, const rdma::QueuePairAddress& peer) {
        const bool lands = options.lands(end);
        require_address(peer, from(end) + (lands ? 500 : 0), lands ? key_of(rank) : 0);
        ++connected;
      };
      ends->landed = [=, &landed](std::size_t end, const rdma::QueuePairAddress& peer) {
        require_address(peer, from(end), 0);
        ++landed;
      };
      return ends;
    };
    const auto made = rdma::make_connected_ends(*bootstrap, sets, kAny, false, make);
    if (connected != 6 || landed != 3) throw std::runtime_error("not every end");
  });
}

// ---- Fabrics that connect rails only: ranks try to reach others, and a refusal becomes one text on all ranks ----

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

/// The reason, which is the same on all ranks.
std::string reason(Fabric& fabric) {
  std::vector<std::string> said(kRanks);
  expect_ranks_succeed(kRanks, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const auto make = [&](NicHandler, const rdma::ConnectionOptions& options) {
      const auto from = [=](std::size_t end) { return number(0, options.peer(end), 0, rank); };
      auto ends = std::make_unique<FakeEnds>();
      ends->own = [=](std::size_t end) -> rdma::QueuePairAddress {
        return {.queue_pair = number(0, rank, 0, options.peer(end))};
      };
      ends->connected = [=, &fabric](std::size_t end, const rdma::QueuePairAddress& peer) {
        require_address(peer, from(end), 0);
        if (!fabric.routes) throw SystemError("no route to the peer");
      };
      ends->reached = [=, &fabric](std::size_t end, std::uint32_t number) {
        if (rank == fabric.unanswered) throw SystemError("a write is not answered");
        if (number != from(end)) throw std::runtime_error("not it");
        const std::lock_guard lock(fabric.mutex);
        fabric.reached.insert({rank, options.peer(end)});
      };
      return ends;
    };
    said[static_cast<std::size_t>(rank)] =
        rdma::why_unreached(*bootstrap, kWidth, /*by_landings=*/false, /*sink=*/0, make);
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
