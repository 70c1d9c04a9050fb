// Low-latency calls over RDMA: operations that fail. What they have in common with calls over NVLink is tested where
// those are, in every topology.
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/low_latency/rdma_params.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 3;

/// Gives kernels a wrong key for one peer's heap, the first time that they get any.
class SpoilingExecutor final : public CountingExecutor {
 public:
  SpoilingExecutor(std::shared_ptr<Executor> inner, LowLatencyChannel channel, int peer)
      : CountingExecutor(std::move(inner)), entry_(static_cast<std::size_t>(channel) * kRanks + peer) {}

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    constexpr std::size_t kEntries = static_cast<std::size_t>(LowLatencyChannel::count) * kRanks;
    if (spoiled_ || bytes != kEntries * sizeof(RdmaPeerParams)) {
      return CountingExecutor::copy(destination, source, bytes, stream);
    }
    spoiled_ = true;
    std::vector<RdmaPeerParams> table(kEntries);
    std::memcpy(table.data(), source, bytes);
    table[entry_].remote_key ^= 0xffu;
    CountingExecutor::copy(destination, table.data(), bytes, stream);
    synchronize(stream);
  }

 private:
  std::size_t entry_;
  bool spoiled_ = false;
};

class LowLatencyRdmaTest : public ClusterTest {};
INSTANTIATE_TEST_SUITE_P(On, LowLatencyRdmaTest, testing::ValuesIn(kThreads), name_of_place);

LowLatencyCase three_ranks() {
  return make_low_latency_case({.tokens = {5, 4, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3});
}

BufferOptions only_rdma(bool masking) {
  BufferOptions options = low_latency_options(kRanks, 6, 256);
  options.low_latency_masking = masking;
  options.allow_nvlink_for_low_latency = false;
  options.timeout_s = short_deadline();
  return options;
}

/// A buffer whose dispatches from rank 0 to rank 2 fail.
Buffer spoiled_buffer(const Rank& rank, bool masking) {
  std::shared_ptr<Executor> executor = rank.executor();
  if (rank.rank() == 0) executor = std::make_shared<SpoilingExecutor>(executor, LowLatencyChannel::dispatch, 2);
  return Buffer(rank.bootstrap(), executor, only_rdma(masking));
}

TEST_P(LowLatencyRdmaTest, AFailedOperationNamesThePeer) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const LowLatencyCase all = three_ranks();
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer buffer = spoiled_buffer(rank, false);
    buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call());
    if (rank.rank() == 0) {
      // The next dispatch looks for the completions of this one.
      rank.executor()->synchronize(rank.stream());
      buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call());
      require_throws<SystemError>([&] { buffer.check(); }, {"RDMA write to rank 2 failed", "remote access"}, "check");
      require_throws<SystemError>([&] { buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call()); },
                                  {"rank 2"}, "every later call");
    } else if (rank.rank() == 2) {
      require_throws<TimeoutError>([&] { buffer.check(); }, {"rank 0", "low-latency dispatch"}, "who got nothing");
    }
    rank.bootstrap()->barrier();  // no heap goes while a NIC of the others may still write to it
  });
}

TEST_P(LowLatencyRdmaTest, WithMaskingThePeerIsMaskedAndComesBackWithNewConnections) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const LowLatencyCase all = three_ranks();
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer buffer = spoiled_buffer(rank, true);
    for (int call = 0; call < 3; ++call) {
      buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call());
      rank.executor()->synchronize(rank.stream());
      rank.bootstrap()->barrier();  // a rank that has waited in vain is not late for the next call
    }
    const TensorView status = rank.upload(std::vector<std::int32_t>(kRanks, -1), DType::int32, {kRanks});
    buffer.low_latency_query_mask(status, rank.call());
    const auto masked = rank.download<std::int32_t>(status);
    const auto expected = [&]() -> std::vector<std::int32_t> {
      if (rank.rank() == 0) return {0, 0, 1};  // it cannot reach rank 2, which hears nothing of it
      return rank.rank() == 2 ? std::vector<std::int32_t>{1, 0, 0} : std::vector<std::int32_t>{0, 0, 0};
    }();
    require_same(expected, masked, "masks");
    buffer.low_latency_resume();
    for (int call = 0; call < 3; ++call) {
      check_low_latency_dispatch(rank, all, buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call()));
    }
    buffer.check();
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
