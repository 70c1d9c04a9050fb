// What all ranks do when a device of one of them refuses to connect.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/rdma/connections.hpp"
#include "csrc/support/format.hpp"
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
  FakeEnds(NicHandler handler, std::function<void()> refusal) : handler_(handler), refusal_(std::move(refusal)) {}

  rdma::QueuePairAddress address(std::size_t) const override {
    return {.queue_pair = static_cast<std::uint32_t>(handler_)};
  }
  RdmaPeerParams connect(std::size_t, const rdma::QueuePairAddress& peer) override {
    if (refusal_) refusal_();
    RdmaPeerParams params;
    params.queue.number = peer.queue_pair;
    return params;
  }
  NicHandler handler() const override { return handler_; }
  void start() override {}
  std::optional<rdma::Failure> failure() const override { return {}; }
  bool idle() const override { return true; }
  std::string describe() const override { return std::string(name_of(handler_)); }

 private:
  NicHandler handler_;
  std::function<void()> refusal_;
};

struct ConnectingCase {
  std::vector<NicHandler> wanted;                ///< of each rank
  int refused = -1;                              ///< the rank whose device refuses to connect ends,
  NicHandler slowest_refused = NicHandler::gpu;  ///< up to those of this handler
  int slow = -1;                                 ///< the rank on which `gpu` is impossible
  std::function<void()> refusal = [] { throw SystemError("INIT2RTR_QP: syndrome 0x764216"); };
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
      NicHandler made = handler == NicHandler::automatic ? NicHandler::gpu : handler;
      if (rank == given.slow) made = std::max(made, NicHandler::doorbell);
      return std::make_unique<FakeEnds>(
          made, rank == given.refused && made <= given.slowest_refused ? given.refusal : nullptr);
    };
    const rdma::ConnectionOptions options{.peers = peer < 0 ? std::vector<int>{} : std::vector<int>{peer}};
    const auto all = rdma::make_connected_ends(*bootstrap, std::array{options}, wanted, true, make);
    const rdma::ConnectedEnds& connected = all.front();
    if (peer < 0) return void(results[static_cast<std::size_t>(rank)] = "nobody");
    const auto number = connected.peers[static_cast<std::size_t>(peer)].queue.number;
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

TEST(ConnectingTest, NothingElseIsTriedWhereThatHelpsNobody) {
  for (const std::string& text : connect({{kAny, NicHandler::gpu}, 1})) {
    EXPECT_TRUE(contains(text, "syndrome 0x764216")) << text;
  }
  for (const std::string& text : connect({{kAny, kAny}, 1, NicHandler::cpu})) {
    EXPECT_TRUE(contains(text, "syndrome 0x764216")) << text;
  }
  for (const std::string& text :
       connect({.wanted = {kAny, kAny}, .refused = 1, .refusal = [] { throw RankMismatch("other fabrics"); }})) {
    EXPECT_TRUE(contains(text, "other fabrics")) << "no handler would connect these";
  }
}

/// A number that no other end has.
std::uint32_t number(std::size_t set, int rank, int channel, int peer) {
  return static_cast<std::uint32_t>(1000 * (set + 1)) + static_cast<std::uint32_t>(100 * rank + 10 * channel + peer);
}

/// Ends whose addresses say which they are, and which refuse any but those at their other sides.
class NamedEnds final : public rdma::Ends {
 public:
  NamedEnds(std::size_t set, int rank, rdma::ConnectionOptions options, int& connected)
      : set_(set), rank_(rank), options_(std::move(options)), connected_(connected) {}
  rdma::QueuePairAddress address(std::size_t end) const override {
    return {.queue_pair = number(set_, rank_, options_.channel(end), options_.peer(end)),
            .heap_key = 7 * static_cast<std::uint32_t>(rank_)};
  }
  RdmaPeerParams connect(std::size_t end, const rdma::QueuePairAddress& peer) override {
    const int other = options_.peer(end);
    if (peer.queue_pair != number(set_, other, options_.channel(end), rank_) ||
        peer.heap_key != 7 * static_cast<std::uint32_t>(other)) {
      throw std::runtime_error("another end");
    }
    ++connected_;
    return {};
  }
  void start() override {}
  std::optional<rdma::Failure> failure() const override { return {}; }
  bool idle() const override { return true; }
  std::string describe() const override { return "named"; }

 private:
  std::size_t set_;
  int rank_;
  rdma::ConnectionOptions options_;
  int& connected_;
};

TEST(ConnectingTest, EveryEndLearnsOfTheOneAtItsOtherSide) {
  // Rank 1 is reached by all, ranks 0 and 2 do not reach each other, rank 3 reaches nobody. The other sets are rings.
  const std::vector<std::vector<int>> star = {{1}, {2, 0}, {1}, {}};
  expect_ranks_succeed(4, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const std::array sets{
        rdma::ConnectionOptions{.peers = star[static_cast<std::size_t>(rank)], .channels = 3},
        rdma::ConnectionOptions{.peers = {(rank + 1) % 4, (rank + 3) % 4}, .channels = 2},
        rdma::ConnectionOptions{.peers = {(rank + 1) % 4, (rank + 3) % 4}, .channels = 400},  // more than go at once
    };
    int connected = 0;
    const auto make = [&](NicHandler, const rdma::ConnectionOptions& options) {
      return std::make_unique<NamedEnds>(options.channels == 3   ? 0U
                                         : options.channels == 2 ? 1U
                                                                 : 2U,
                                         rank, options, connected);
    };
    const auto made = rdma::make_connected_ends(*bootstrap, sets, kAny, false, make);
    if (connected != static_cast<int>(sets[0].ends() + sets[1].ends() + sets[2].ends()))
      throw std::runtime_error("not every end");
    if ((made[0].ends == nullptr) != sets[0].peers.empty()) throw std::runtime_error("ends to nobody");
  });
}

/// If rails alone are connected, numbers of landings are those of ends and this.
constexpr std::uint32_t kLanding = 500;

/// An end of rank `rank` whose other side is `landing`, or not: its address must be that of `of`.
void require_address(const rdma::QueuePairAddress& address, std::uint32_t of, int landing_rail) {
  const std::uint32_t key = landing_rail < 0 ? 0 : 70 + static_cast<std::uint32_t>(landing_rail);
  const std::uint32_t named = of + (landing_rail < 0 ? 0 : kLanding);
  if (address.queue_pair != named || address.heap_key != key) throw std::runtime_error("another other side");
}

class RailEnds final : public rdma::Ends {
 public:
  RailEnds(int rank, rdma::ConnectionOptions options, int& connected, int& landed)
      : rank_(rank), options_(std::move(options)), connected_(connected), landed_(landed) {}
  rdma::QueuePairAddress address(std::size_t end) const override {
    return {.queue_pair = number(0, rank_, options_.channel(end), options_.peer(end))};
  }
  RdmaPeerParams connect(std::size_t end, const rdma::QueuePairAddress& peer) override {
    const int rail = options_.lands(end, rank_) ? options_.rail_of(rank_) : -1;
    require_address(peer, number(0, options_.peer(end), options_.channel(end), rank_), rail);
    ++connected_;
    return {};
  }
  rdma::QueuePairAddress landing(std::size_t end) const override {
    return {.queue_pair = kLanding + number(0, rank_, options_.channel(end), options_.peer(end)),
            .heap_key = 70 + static_cast<std::uint32_t>(options_.rail_of(options_.peer(end)))};
  }
  void connect_landing(std::size_t end, const rdma::QueuePairAddress& peer) override {
    require_address(peer, number(0, options_.peer(end), options_.channel(end), rank_), -1);
    ++landed_;
  }
  void start() override {}
  std::optional<rdma::Failure> failure() const override { return {}; }
  bool idle() const override { return true; }
  std::string describe() const override { return "rail ends"; }

 private:
  int rank_;
  rdma::ConnectionOptions options_;
  int& connected_;
  int& landed_;
};

TEST(ConnectingTest, WhereRailsAloneAreConnectedOthersAreReachedByLandings) {
  expect_ranks_succeed(4, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const int other_node = rank < 2 ? 2 : 0;
    const std::array sets{
        rdma::ConnectionOptions{.peers = {other_node + 1, other_node}, .channels = 3, .rail_width = 2}};
    int connected = 0;
    int landed = 0;
    const auto made = rdma::make_connected_ends(*bootstrap, sets, kAny, false, [&](NicHandler, const auto& options) {
      return std::make_unique<RailEnds>(rank, options, connected, landed);
    });
    if (connected != 6 || landed != 3) throw std::runtime_error("not every end");
  });
}

}  // namespace
}  // namespace deep_ep::test
