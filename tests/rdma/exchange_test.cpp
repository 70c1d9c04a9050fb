// Rings filled by kernels, executed by `cpu` handlers over the `local` wire, between several ranks: on the CPU executor
// a rank has an executor of its own, on a GPU all ranks share it.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/local/local_wire.hpp"
#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "deep_ep/executor.hpp"
#include "tests/rdma/exchange.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::test {
namespace {

struct Settings {
  int ranks = 3;
  int rows = 70;
  std::uint32_t depth = 64;
  std::uint32_t batch = 16;
  std::uint64_t first_index = 0;
  bool one_thread = false;
};

/// What each rank has.
class Rank {
 public:
  Rank(std::shared_ptr<Executor> executor, int rank, const Settings& settings)
      : executor_(std::move(executor)),
        rank_(rank),
        settings_(settings),
        bytes_(Exchange::heap_bytes(settings.ranks, settings.rows)),
        heap_(static_cast<std::byte*>(executor_->allocate(bytes_))),
        peers_(*executor_, static_cast<std::size_t>(settings.ranks)),
        exchange_(executor_, heap_, rank, settings.ranks, settings.rows),
        rings_(executor_, {.count = static_cast<std::size_t>(settings.ranks),
                           .depth = settings.depth,
                           .batch = settings.batch,
                           .first_index = settings.first_index}) {
    const OwnStream stream(*executor_);
    executor_->fill(heap_, 0, bytes_, stream.get());
    executor_->synchronize(stream.get());
    if (settings.one_thread) exchange_.post_by_one_thread();
  }
  ~Rank() {
    handler_.reset();
    executor_->free(heap_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  /// Queue pairs to all others; `known` says which heaps the wire may reach.
  void connect(const std::vector<std::unique_ptr<Rank>>& ranks, int known) {
    const bool cuda = executor_->device().kind == Device::Kind::cuda;
    auto wire =
        std::make_unique<rdma::LocalWire>(cuda ? rdma::make_executor_memory(executor_) : rdma::make_host_memory());
    for (int r = 0; r < known; ++r) {
      wire->add_memory(rdma::local_key_of_rank(r), ranks[static_cast<std::size_t>(r)]->heap_, bytes_);
    }
    std::vector<rdma::CpuHandler::QueuePair> pairs;
    for (int peer = 0; peer < settings_.ranks; ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      pairs.push_back({.number = 0x40u + static_cast<std::uint32_t>(peer), .peer = peer});
      wire->add_queue_pair(pairs.back().number);
      const std::uint32_t mine = rdma::local_key_of_rank(rank_);
      const std::uint32_t theirs = rdma::local_key_of_rank(peer);
      peers_[i] = {rings_.queue_pair(i, pairs.back().number, peer), mine, theirs, theirs};
      peers_[i].queue.sink = {exchange_.sink(peer), mine};
    }
    handler_ = std::make_unique<rdma::CpuHandler>(std::move(wire), rings_, pairs, "local wire");
  }

  void launch(int epochs) { exchange_.launch(peers_.data(), epochs); }
  Exchange& exchange() { return exchange_; }
  rdma::CpuHandler& handler() { return *handler_; }

 private:
  std::shared_ptr<Executor> executor_;
  int rank_;
  Settings settings_;
  std::size_t bytes_;
  std::byte* heap_;
  Shared<RdmaPeerParams> peers_;
  Exchange exchange_;
  rdma::RingMemory rings_;
  std::unique_ptr<rdma::CpuHandler> handler_;
};

enum class ExchangeOn { cpu, gpu };

class RdmaExchange : public testing::TestWithParam<ExchangeOn> {
 protected:
  void SetUp() override {
    if (GetParam() == ExchangeOn::gpu && cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  }

  static std::vector<std::unique_ptr<Rank>> make_ranks(const Settings& settings, std::uint64_t seed = 0) {
    std::vector<std::unique_ptr<Rank>> ranks;
    std::shared_ptr<Executor> executor;
    for (int r = 0; r < settings.ranks; ++r) {
      if (GetParam() == ExchangeOn::cpu) {
        executor = make_host_executor({.seed = seed == 0 ? 0 : seed + static_cast<std::uint64_t>(r)});
      } else if (executor == nullptr) {
        executor = make_cuda_executor(0);
      }
      ranks.push_back(std::make_unique<Rank>(executor, r, settings));
    }
    return ranks;
  }

  static void expect_all_arrives(const Settings& settings, std::uint64_t seed = 0) {
    const auto ranks = make_ranks(settings, seed);
    for (const auto& rank : ranks) rank->connect(ranks, settings.ranks);
    // The second launch finds the queue pairs as the first one left them.
    for (int launch = 0; launch < 2; ++launch) {
      for (const auto& rank : ranks) rank->launch(4);
      for (const auto& rank : ranks) rank->exchange().synchronize();
    }
    for (const auto& rank : ranks) {
      EXPECT_NO_THROW(rank->exchange().require_all_arrived());
      EXPECT_FALSE(rank->handler().failure().has_value());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, RdmaExchange, testing::Values(ExchangeOn::cpu, ExchangeOn::gpu),
                         [](const auto& info) { return info.param == ExchangeOn::cpu ? "Cpu" : "Gpu"; });

TEST_P(RdmaExchange, AWarpPostsTogether) { expect_all_arrives({}); }

TEST_P(RdmaExchange, OneThreadPosts) { expect_all_arrives({.one_thread = true}); }

TEST_P(RdmaExchange, RingsWrap) {
  for (const std::uint64_t first : {0xffbfull, 0xfff0ull, 0xffffull}) {
    expect_all_arrives({.ranks = 2, .rows = 90, .batch = 32, .first_index = first});
  }
}

TEST_P(RdmaExchange, UnderManySchedules) {
  if (GetParam() == ExchangeOn::gpu) GTEST_SKIP() << "a GPU has no seed";
  for (std::uint64_t seed = 10; seed < (DEEP_EP_TSAN ? 40u : 100u); seed += 10) {
    expect_all_arrives({.ranks = 2, .rows = 40, .one_thread = seed % 20 == 0}, seed);
  }
}

}  // namespace
}  // namespace deep_ep::test
