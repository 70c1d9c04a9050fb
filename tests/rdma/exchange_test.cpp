// Rings filled by kernels, executed by `cpu` handlers over the `local` wire, between several ranks: on the CPU executor
// a rank has an executor of its own, on a GPU all ranks share it.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "csrc/rdma/local/local_wire.hpp"
#include "csrc/rdma/ring/cpu_nic_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "deep_ep/executor.hpp"
#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/contains.hpp"
#include "tests/rdma/exchange_kernel.hpp"

namespace deep_ep::test {
namespace {

const TestKernel<ExchangeParams> kExchange(DEEP_EP_TEST_LAUNCHERS(rdma_exchange));

struct Settings {
  int ranks = 3;
  int rows = 70;
  std::uint32_t depth = 64;
  std::uint32_t batch = 16;
  std::uint64_t first_index = 0;
  bool one_thread = false;
};

/// What one rank has.
class Rank {
 public:
  Rank(std::shared_ptr<Executor> executor, int rank, const Settings& settings)
      : executor_(std::move(executor)),
        settings_(settings),
        faults_(*executor_, 2),
        wrong_(*executor_, 1),
        peers_(*executor_, static_cast<std::size_t>(settings.ranks)) {
    params_.rank = rank;
    params_.num_ranks = settings.ranks;
    params_.rows = settings.rows;
    params_.one_thread = settings.one_thread;
    params_.peers = peers_.data();
    params_.wrong_words = wrong_.data();
    heap_ = static_cast<std::byte*>(executor_->allocate(params_.heap_bytes()));
    abort_ = static_cast<std::uint64_t*>(executor_->allocate(sizeof(std::uint64_t)));
    stream_ = executor_->create_stream();
    executor_->fill(heap_, 0, params_.heap_bytes(), stream_);
    executor_->fill(abort_, 0, sizeof(std::uint64_t), stream_);
    executor_->synchronize(stream_);
    params_.heap = heap_;
    params_.wait = {faults_.data(), abort_, 60'000'000'000};
  }
  ~Rank() {
    handler_.reset();
    executor_->destroy_stream(stream_);
    executor_->free(abort_);
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
      wire->add_memory(rdma::local_key_of_rank(r), ranks[static_cast<std::size_t>(r)]->heap_, params_.heap_bytes());
    }
    const auto number = [](int peer) { return 0x40u + static_cast<std::uint32_t>(peer); };
    for (int peer = 0; peer < settings_.ranks; ++peer) {
      rings_.push_back(std::make_unique<rdma::RingMemory>(
          executor_, rdma::RingOptions{number(peer), settings_.depth, settings_.batch, peer, settings_.first_index}));
      wire->add_queue_pair(number(peer));
      const std::uint32_t mine = rdma::local_key_of_rank(params_.rank);
      const std::uint32_t theirs = rdma::local_key_of_rank(peer);
      RdmaPeerParams& target = peers_[static_cast<std::size_t>(peer)];
      target = {rings_.back()->queue_pair(), mine, theirs, theirs};
      target.queue.sink = {params_.sink(peer), mine};
    }
    handler_ = std::make_unique<rdma::CpuNicHandler>(std::move(wire));
    for (int peer = 0; peer < settings_.ranks; ++peer) {
      const rdma::RingMemory& ring = *rings_[static_cast<std::size_t>(peer)];
      handler_->add({number(peer), settings_.depth, ring.ring(), ring.completion(), ring.producer_index(),
                     settings_.first_index, peer, "local wire"});
    }
  }

  void launch(int first_epoch, int epochs) {
    params_.first_epoch = first_epoch;
    params_.epochs = epochs;
    kExchange(*executor_, stream_, {settings_.ranks, 32, 0}, params_);
  }
  void synchronize() { executor_->synchronize(stream_); }

  std::uint64_t wrong_words() const { return wrong_[0]; }
  const FaultRecord& fault() const { return faults_[0]; }
  rdma::NicHandler& handler() { return *handler_; }

 private:
  std::shared_ptr<Executor> executor_;
  Settings settings_;
  Shared<FaultRecord> faults_;
  Shared<std::uint64_t> wrong_;
  Shared<RdmaPeerParams> peers_;
  ExchangeParams params_;
  std::byte* heap_ = nullptr;
  std::uint64_t* abort_ = nullptr;
  StreamHandle stream_ = nullptr;
  std::vector<std::unique_ptr<rdma::RingMemory>> rings_;
  std::unique_ptr<rdma::CpuNicHandler> handler_;
};

enum class Where { cpu, gpu };

class RdmaExchange : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (GetParam() == Where::gpu && cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  }

  static std::vector<std::unique_ptr<Rank>> make_ranks(const Settings& settings, std::uint64_t seed = 0) {
    std::vector<std::unique_ptr<Rank>> ranks;
    std::shared_ptr<Executor> executor;
    for (int r = 0; r < settings.ranks; ++r) {
      if (GetParam() == Where::cpu) {
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
    // The second launch finds queue pairs as the first one left them.
    for (const int first : {1, 5}) {
      for (const auto& rank : ranks) rank->launch(first, 4);
      for (const auto& rank : ranks) rank->synchronize();
    }
    for (const auto& rank : ranks) {
      EXPECT_EQ(rank->wrong_words(), 0u);
      EXPECT_EQ(rank->fault().claimed, 0u);
      EXPECT_NO_THROW(rank->handler().check());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, RdmaExchange, testing::Values(Where::cpu, Where::gpu),
                         [](const auto& info) { return info.param == Where::cpu ? "Cpu" : "Gpu"; });

TEST_P(RdmaExchange, AWarpPostsTogether) { expect_all_arrives({}); }

TEST_P(RdmaExchange, OneThreadPosts) { expect_all_arrives({.one_thread = true}); }

TEST_P(RdmaExchange, RingsWrap) {
  for (const std::uint64_t first : {0xffbfull, 0xfff0ull, 0xffffull}) {
    expect_all_arrives({.ranks = 2, .rows = 90, .batch = 32, .first_index = first});
  }
}

TEST_P(RdmaExchange, FourRanksAndFewRows) { expect_all_arrives({.ranks = 4, .rows = 3, .batch = 1}); }

TEST_P(RdmaExchange, UnderManySchedules) {
  if (GetParam() == Where::gpu) GTEST_SKIP() << "a GPU has no seed";
  for (std::uint64_t seed = 10; seed < (DEEP_EP_TSAN ? 40u : 100u); seed += 10) {
    expect_all_arrives({.ranks = 2, .rows = 40, .one_thread = seed % 20 == 0}, seed);
  }
}

TEST_P(RdmaExchange, AnUnknownKeyIsReportedByKernelAndHandler) {
  const Settings settings{.ranks = 2};
  const auto ranks = make_ranks(settings);
  for (const auto& rank : ranks) rank->connect(ranks, /*known=*/1);
  for (const auto& rank : ranks) rank->launch(1, 1);
  for (const auto& rank : ranks) rank->synchronize();
  // Rank 0 does not reach rank 1's heap; rank 1 cannot read its own.
  const rdma::Syndrome expected[] = {rdma::Syndrome::remote_access, rdma::Syndrome::local_protection};
  for (std::size_t r = 0; r < 2; ++r) {
    ASSERT_EQ(ranks[r]->fault().kind, FaultKind::rdma_failed);
    EXPECT_TRUE(contains(rdma::describe_fault(static_cast<int>(r), ranks[r]->fault()), rdma::text(expected[r])));
    const auto failure = ranks[r]->handler().failure();
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->peer, 1 - static_cast<int>(r));
    EXPECT_EQ(failure->syndrome, expected[r]);
    EXPECT_EQ(failure->device, "local wire");
  }
}

}  // namespace
}  // namespace deep_ep::test
