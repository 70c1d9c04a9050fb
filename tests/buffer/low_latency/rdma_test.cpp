// Low-latency calls over RDMA: operations that fail, and many schedules. What they share with calls over NVLink is
// tested there, in every topology; ThreadSanitizer sees it here.

#include "kernels/low_latency/params.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/queue_pairs_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr int kFarRanks = 3;

class LowLatencyRdmaTest : public ClusterTest {};
INSTANTIATE_TEST_SUITE_P(On, LowLatencyRdmaTest, testing::ValuesIn(kThreads), name_of_place);

LowLatencyCase three_ranks() {
  return make_low_latency_case({.tokens = {5, 4, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3});
}

BufferOptions only_rdma_with_masks() {
  BufferOptions options = low_latency_options(kFarRanks, 6, 256);
  options.low_latency.masking = true;
  options.low_latency.allow_nvlink = false;
  options.timeout_s = short_deadline();
  return options;
}

TEST_P(LowLatencyRdmaTest, WithMaskingThePeerIsMaskedAndComesBackWithNewConnections) {
  const LowLatencyCase all = three_ranks();
  run_cluster(cluster_with_absentees(kFarRanks), [&](Rank& rank) {
    std::shared_ptr<Executor> executor = rank.executor();
    if (rank.rank() == 0) {  // whose dispatches to rank 2 fail
      executor = spoiling_executor(executor, kFarRanks, low_latency_channels(1), int(LowLatencyKind::dispatch), 2);
    }
    Buffer buffer(rank.bootstrap(), executor, only_rdma_with_masks());
    require_one_left_out(rank, buffer, all);
    buffer.low_latency_resume();
    for (int call = 0; call < 3; ++call) {
      check_low_latency_dispatch(rank, all, buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call()));
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Has no memory for rings when told so.
class PoorExecutor final : public CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  bool poor = false;
  void* allocate_pinned(std::size_t bytes) override {
    if (poor) throw OutOfMemory("no pinned memory is left");
    return CountingExecutor::allocate_pinned(bytes);
  }
};

TEST_P(LowLatencyRdmaTest, AResumeThatFailsEndsTheBuffer) {
  const LowLatencyCase all = three_ranks();
  run_cluster(cluster(kFarRanks), [&](Rank& rank) {
    const auto executor = std::make_shared<PoorExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), executor, only_rdma_with_masks());
    check_low_latency_dispatch(rank, all, buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call()));
    executor->poor = rank.rank() == 1;
    const auto resume = [&] { buffer.low_latency_resume(); };
    if (rank.rank() == 1) {
      require_throws<OutOfMemory>(resume, {"no pinned memory is left"}, "its own error keeps its type");
    } else {
      require_throws<SystemError>(resume, {"no pinned memory is left"}, "the others");
    }
    executor->poor = false;
    require_throws<SystemError>([&] { buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call()); },
                                {"low_latency_resume", "no pinned memory is left"}, "every later call");
    buffer.destroy();
  });
}

/// Dispatch and combine, with and without hooks, two in flight, over NVLink, too.
TEST(LowLatencyRdmaScheduleTest, EverySeedGivesTheSame) {
  const LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = {9, 0, 14, 2},
                                                                   .max_tokens = 14,
                                                                   .hidden = 256,
                                                                   .topk = 3,
                                                                   .routing = oracle::Routing::some_dropped,
                                                                   .seed = 3});
  constexpr Topology kTopologies[] = {Topology::only_rdma, Topology::two_nodes, Topology::one_node};
  under_schedules({.usually = 9}, [&](std::uint64_t seed) {
    ClusterOptions options{.ranks = 4};
    const Topology topology = options.where.topology = kTopologies[seed % 3];
    options.host = {.multiprocessors = 2, .warps_per_block = seed % 4 == 0 ? 8 : 4, .seed = seed};
    run_with_buffers(options, low_latency_options(4, 14, 256), [&](Rank& rank, Buffer& buffer) {
      for (int round = 0; round < 2; ++round) {
        const auto expected = one.expected(ranks_per_node_of(topology, 4));
        const auto a = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one.before)), rank.call());
        const auto b = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one.before)), rank.call());
        b.hook();
        check_low_latency_dispatch(rank, one.before, a);
        check_low_latency_dispatch(rank, one.before, b);
        const LowLatencyCombineArguments arguments = upload_combine(rank, one, a.handle);
        const auto now = buffer.low_latency_combine(arguments, rank.call());
        const auto later = buffer.low_latency_combine(with_hook(arguments), rank.call());
        check_low_latency_combine(rank, one, expected, now.combined_x.view());
        later.hook();
        check_low_latency_combine(rank, one, expected, later.combined_x.view());
      }
      buffer.low_latency_clean(rank.call().stream);
      buffer.check();
    });
  });
}

}  // namespace
}  // namespace deep_ep::test
