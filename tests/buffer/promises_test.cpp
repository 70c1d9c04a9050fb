// Errors that the headers promise and that no test of a call meets, and what goes on working behind them.
#include <limits>
#include <stdexcept>

#include "deep_ep/environment.hpp"
#include "deep_ep/log.hpp"
#include "tests/buffer/elastic/combine_case.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/recording_executor.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

class PromisesTest : public ClusterTest {};
DEEP_EP_ON_THREADS(PromisesTest);

/// The window of V2 must hold the rows of one token. The ranks learn of it when others may have begun the call.
TEST_P(PromisesTest, SmallWindowsAreNamedByTheSecondInterface) {
  const Case wide = make_case({.tokens = {5, 4}, .topk = 2, .hidden = 8192});
  const ElasticCase wide_sums = make_elastic_case(make_case({.tokens = {5, 4}, .topk = 2, .combine_hidden = 8192}), {});
  for (const int refused : {0, 1, 2}) {
    run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
      Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20, .window_bytes = std::size_t{12} << 10});
      ElasticDispatchResult result;
      const auto combine = dispatch_for_combine(rank, buffer, wide_sums, result);
      const std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
      const auto call = [&] {
        if (refused == 0) buffer.dispatch_elastic(elastic_arguments(rank, wide, {}), rank.call());
        if (refused == 1) buffer.combine_elastic(combine, rank.call());
        if (refused == 2) buffer.begin_combine_elastic(combine, rank.call());
      };
      require_throws<OutOfMemory>(call, {"window of 12.00 KiB", "raise heap_bytes"}, "a row that is too large");
      rank.bootstrap()->barrier();
    });
  }
}

TEST(Promises, ExactSizesOfTheSecondInterfaceAreNotRecorded) {
  const auto bootstrap = make_thread_bootstraps(1).front();
  const auto executor = std::make_shared<RecordingExecutor>(make_host_executor());
  Rank rank(0, {.ranks = 1}, bootstrap, executor);
  Buffer& buffer = rank.buffer();
  const ElasticCase one = make_elastic_case(make_case({.tokens = {5}, .topk = 2}), {});
  const ElasticDispatchArguments exact = elastic_arguments(rank, one.one, one.kind);
  record(rank, *executor, [&] {
    require_throws<InvalidArgument>([&] { buffer.dispatch_elastic(exact, rank.call()); }, {"records a CUDA graph"},
                                    "exact sizes");
  });
  ElasticDispatchResult result;
  const auto combine = dispatch_for_combine(rank, buffer, one, result);
  check_elastic(rank, one, buffer.combine_elastic(combine, rank.call()));
}

/// Masking needs control threads on all ranks, rows that stay, and ranks of one node.
TEST(Promises, MaskingAndReplacedRanks) {
  const LowLatencyCombineCase one =
      make_low_latency_combine_case({.tokens = {3, 5}, .max_tokens = 5, .hidden = 256, .topk = 3});
  const BufferOptions plain = low_latency_options(2, 5, 256);
  BufferOptions masking = plain, nodes = plain;
  masking.low_latency.masking = nodes.low_latency.masking = true;
  nodes.ranks_per_node = 1;
  const std::vector others{0, 1};
  {
    const Setting off("DEEP_EP_CONTROL", "off");
    run_cluster({.ranks = 2}, [&](Rank& rank) {
      require_throws<InvalidArgument>([&] { rank.own_buffer(masking); }, {"DEEP_EP_CONTROL is off"}, "masking");
    });
  }
  run_with_buffers({.ranks = 2}, plain, [&](Rank& rank, Buffer& buffer) {
    const TensorView status = rank.upload(std::vector<std::int32_t>(2), DType::int32, {2});
    const StreamHandle stream = rank.stream();
    const auto refused = [&](const char* what, const auto& call) {
      require_throws<InvalidArgument>(call, {"masking"}, what);
    };
    refused("update", [&] { buffer.low_latency_update_mask(0, true, stream); });
    refused("query", [&] { buffer.low_latency_query_mask(status, stream); });
    refused("clear", [&] { buffer.low_latency_clear_mask(stream); });
    refused("resume", [&] { buffer.low_latency_resume(); });
    refused("replace", [&] { buffer.replace_ranks(rank.bootstrap(), others); });
    dispatch_and_combine(rank, buffer, one, one.expected());
  });
  run_with_buffers({.ranks = 2}, masking, [&](Rank& rank, Buffer& buffer) {
    LowLatencyDispatchArguments counted = upload_arguments(rank, one.before);
    counted.arrival_counters = rank.upload(std::vector<std::int64_t>(3), DType::int64, {3, 1});
    require_throws<InvalidArgument>([&] { buffer.low_latency_dispatch(counted, rank.call()); },
                                    {"arrival_counters", "masking"}, "arrival counters");
    dispatch_and_combine(rank, buffer, one, one.expected());
  });
  run_with_buffers({.ranks = 2}, nodes, [&](Rank& rank, Buffer& buffer) {
    require_throws<Unsupported>([&] { buffer.replace_ranks(rank.bootstrap(), others); }, {"RDMA"}, "several nodes");
    dispatch_and_combine(rank, buffer, one, one.expected());
  });
}

/// With ranks that RDMA reaches, rows do not wait for signals of the program.
TEST(Promises, OverlapIsNotBetweenNodes) {
  const LowLatencyCombineCase one =
      make_low_latency_combine_case({.tokens = {3, 5}, .max_tokens = 5, .hidden = 256, .topk = 3});
  BufferOptions nodes = low_latency_options(2, 5, 256);
  nodes.ranks_per_node = 1;
  run_with_buffers({.ranks = 2}, nodes, [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    LowLatencyCombineArguments arguments = with_hook(upload_combine(rank, one, handle));
    arguments.overlap.emplace();
    require_throws<Unsupported>([&] { buffer.low_latency_combine(arguments, rank.call()); }, {"overlap"}, "RDMA");
    dispatch_and_combine(rank, buffer, one, one.expected());
  });
}

/// One rank makes a buffer, or suspends it, alone.
TEST(Promises, RanksThatDoNotCome) {
  const double deadline = short_deadline();
  const auto groups = make_thread_bootstraps(2, deadline), others = make_thread_bootstraps(2, deadline);
  const BufferOptions options{.heap_bytes = std::size_t{16} << 20, .timeout_s = deadline};
  const auto executor = make_host_executor();
  EXPECT_THROW(Buffer(groups[0], executor, options), TimeoutError);
  run_cluster({.ranks = 2}, [&](Rank& rank) {
    Buffer buffer(others[static_cast<std::size_t>(rank.rank())], rank.executor(), options);
    if (rank.rank() == 0) require_throws<TimeoutError>([&] { buffer.suspend(); }, {}, "suspend");
    rank.bootstrap()->barrier();
  });
}

TEST(Promises, Executors) {
  const auto host = make_host_executor();
  EXPECT_THROW(host->elapsed_seconds(nullptr, nullptr), InvalidArgument);
  if (!under_sanitizer()) {  // whose allocators end the process
    EXPECT_THROW(host->allocate(std::numeric_limits<std::size_t>::max() / 2), OutOfMemory);
    EXPECT_THROW(host->allocate_pinned(std::numeric_limits<std::size_t>::max() / 2), OutOfMemory);
  }
  EXPECT_THROW(make_cuda_executor(cuda_device_count() + 1000), SystemError);
}

TEST(Promises, Environment) {
  EXPECT_THROW(environment_text("DEEP_EP_NO_SUCH_VARIABLE"), std::logic_error);
  const Setting wrong("DEEP_EP_CONTROL", "perhaps");
  EXPECT_THROW(environment_text("DEEP_EP_CONTROL"), InvalidArgument);
  const Setting soon("DEEP_EP_TIMEOUT_S", "soon");
  EXPECT_THROW(default_timeout_s(), InvalidArgument);
}

}  // namespace
}  // namespace deep_ep::test
