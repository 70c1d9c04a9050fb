// Dispatch of the second interface: little memory, ranks that do not agree or come late, wrong arguments.
#include <chrono>
#include <thread>

#include "tests/buffer/elastic/dispatch_case.hpp"
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/late_block_executor.hpp"
#include "tests/cluster/marking_executor.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep::test {
namespace {

class ElasticDispatchTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticDispatchTest);

TEST_P(ElasticDispatchTest, BetweenNodesWithoutRoomInTheHeap) {
  const Case one = make_case({.tokens = {13, 0, 30, 9}, .hidden = 1800, .scales = 3, .ranks_per_node = 2});
  run_with_buffers(cluster(4), {.heap_bytes = 8 * kMiB, .window_bytes = 256 * kKiB, .ranks_per_node = 2},
                   [&](Rank& rank, Buffer& buffer) {
                     std::vector<Tensor> hoard;
                     if (rank.rank() != 2) hoard = take_whole_heap(rank, buffer);
                     const ElasticKind kind{.expand = true};
                     const ElasticDispatchArguments arguments = elastic_arguments(rank, one, kind);
                     const ElasticDispatchResult result = buffer.dispatch_elastic(arguments, rank.call());
                     check_elastic(rank, one, kind, result);
                     check_elastic_rows(
                         rank, one, kind,
                         buffer.dispatch_elastic(cached_arguments(kind, arguments, result), rank.call()));
                     hoard.clear();
                   });
}

TEST_P(ElasticDispatchTest, RanksThatDisagreeLearnOfIt) {
  // Few selections are told before ranks have met, many into windows.
  const Case few = make_case({.tokens = {20, 5}, .local_experts = 4, .hidden = 80});
  const Case many = make_case({.tokens = {2100, 5}, .local_experts = 4, .hidden = 16});
  const std::string words[] = {"dispatch: maximum of tokens of a rank is", "dispatch: number of experts is",
                               "dispatch: topk_weights is", "of a dispatch 1 with a handle) is"};
  for (const Case* one : {&few, &many}) {
    for (int change = 0; change < 4; ++change) {
      run_cluster(cluster(2), [&](Rank& rank) {
        Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMiB});
        const ElasticKind kind{.weights = change < 3};
        ElasticDispatchArguments mine = elastic_arguments(rank, *one, kind);
        ElasticDispatchResult earlier;
        if (change == 3) earlier = buffer.dispatch_elastic(mine, rank.call());
        if (rank.rank() == 1) {
          if (change == 0) mine.max_tokens = 5;
          if (change == 1) mine.num_experts += 2;
          if (change == 2) mine.topk_weights.reset();
          if (change == 3) mine = cached_arguments(kind, mine, earlier);
        }
        require_mismatch(buffer, {words[change]}, [&] {
          buffer.dispatch_elastic(mine, rank.call());
          rank.executor()->synchronize(rank.stream());  // a call with a handle does not wait on the host
        });
        rank.bootstrap()->barrier();
      });
    }
  }
}

TEST_P(ElasticDispatchTest, RanksThatDisagreeStayInStepWithALateOne) {
  const Case one = make_case({.tokens = {5, 6, 4}, .local_experts = 4, .hidden = 80});
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMiB});
    for (int call = 0; call < 2; ++call) {
      ElasticDispatchArguments mine = elastic_arguments(rank, one, {.weights = true});
      if (rank.rank() == 0) mine.topk_weights.reset();
      if (rank.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      require_mismatch(buffer, {"dispatch: topk_weights is"}, [&] {
        buffer.dispatch_elastic(mine, rank.call());
        rank.executor()->synchronize(rank.stream());
      });
    }
    const ElasticKind kind{};
    check_elastic(rank, one, kind, buffer.dispatch_elastic(elastic_arguments(rank, one, kind), rank.call()));
  });
}

TEST_P(ElasticDispatchTest, ABlockMayBeginLaterThanTheNextCallOfAnotherRank) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "schedules are the CPU executor's";
  // A block tells, five send, and three number. Selections and the size of rows differ from call to call.
  const auto case_of = [](int seed) {
    return make_case({.tokens = {40, 33},
                      .local_experts = 4,
                      .topk = 8,
                      .hidden = 64 + 16 * seed,
                      .seed = static_cast<std::uint64_t>(seed)});
  };
  const Case cases[] = {case_of(1), case_of(2), case_of(3), case_of(4)};
  for (int block = 0; block < 9; ++block) {
    LateBlock shared{.block = block};
    ClusterOptions options = cluster(2);
    options.host = {.multiprocessors = 12, .warps_per_block = 8};
    run_cluster(options, [&](Rank& rank) {
      Buffer buffer(rank.bootstrap(), std::make_shared<LateBlockExecutor>(rank.executor(), shared, rank.rank() == 0),
                    {.heap_bytes = 8 * kMiB});
      for (int call = 0; call < 4; ++call) {
        const ElasticKind kind{.exact = call % 2 == 0, .stats = true};
        ElasticDispatchArguments arguments = elastic_arguments(rank, cases[call], kind);
        arguments.num_sms = 8;
        if (call != 1) {
          check_elastic(rank, cases[call], kind, buffer.dispatch_elastic(arguments, rank.call()));
          continue;
        }
        if (rank.rank() == 0) arguments.topk_weights.reset();
        require_mismatch(buffer, {"dispatch: topk_weights is"}, [&] {
          buffer.dispatch_elastic(arguments, rank.call());
          rank.executor()->synchronize(rank.stream());
        });
      }
      buffer.destroy();
    });
  }
}

TEST_P(ElasticDispatchTest, NothingIsMovedAfterADisagreement) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "memory that the test has marked";
  const Case one = make_case({.tokens = {9, 6}, .local_experts = 4, .hidden = 80, .scales = 4, .alignment = 16});
  for (const int ranks_per_node : {2, 1}) {
    for (const bool expand : {false, true}) {
      run_cluster(cluster(2), [&](Rank& rank) {
        Buffer buffer(rank.bootstrap(), std::make_shared<MarkingExecutor>(rank.executor()),
                      {.heap_bytes = 8 * kMiB, .ranks_per_node = ranks_per_node});
        ElasticDispatchArguments arguments =
            elastic_arguments(rank, one, {.exact = false, .expand = expand, .stats = true});
        arguments.zero_padding = true;
        if (rank.rank() == 0) arguments.topk_weights.reset();
        const ElasticDispatchResult result = buffer.dispatch_elastic(arguments, rank.call());
        require_mismatch(buffer, {"dispatch: topk_weights is"}, [&] { rank.executor()->synchronize(rank.stream()); });
        for (const TensorView& made : {result.recv_x.view(), result.recv_x_scales->view()}) {
          require_same(std::vector<std::uint32_t>(made.bytes() / 4, MarkingExecutor::kMark),
                       rank.download<std::uint32_t>(made), "memory of a result");
        }
        require_same(std::vector<std::int32_t>(4, 100), rank.download<std::int32_t>(*arguments.stats), "statistics");
        buffer.destroy();
      });
    }
  }
}

TEST_P(ElasticDispatchTest, ARankThatDoesNotComeIsNamed) {
  const Case one = make_case({.tokens = {5, 6, 7}});
  run_cluster(cluster_with_absentees(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMiB, .timeout_s = short_deadline()});
    if (rank.rank() != 2) {
      require_throws<TimeoutError>([&] { buffer.dispatch_elastic(elastic_arguments(rank, one, {}), rank.call()); },
                                   {"for rank 2", "where it wants its rows (dispatch kernel)"}, "dispatch");
    }
    rank.bootstrap()->barrier();
  });
}

TEST_P(ElasticDispatchTest, SharedMemoryForCounters) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "a device with little shared memory";
  ClusterOptions options = cluster(2);
  options.host.max_shared_bytes = std::size_t{16} << 10;
  const Case one = make_case({.tokens = {3, 2}, .local_experts = 1200, .topk = 8, .hidden = 16});
  run_with_buffers(options, {.heap_bytes = 16 * kMiB, .max_local_experts = 1400}, [&](Rank& rank, Buffer& buffer) {
    ElasticDispatchArguments arguments = elastic_arguments(rank, one, {});
    arguments.num_experts = 2800;
    require_throws<InvalidArgument>(
        [&] { buffer.dispatch_elastic(arguments, rank.call()); },
        {"num_experts is 2800, allowed: so many that counters of 1400 experts fit 16384 bytes of shared memory"},
        "counters");
    arguments.num_experts = one.shape.experts();
    check_elastic_rows(rank, one, {}, buffer.dispatch_elastic(arguments, rank.call()));
  });
}

TEST_P(ElasticDispatchTest, WrongArgumentsAreNamed) {
  const Case one = make_case({.tokens = {5}, .scales = 2});
  run_with_buffers(cluster(1), {.heap_bytes = 8 * kMiB}, [&](Rank& rank, Buffer& buffer) {
    const ElasticDispatchArguments right = elastic_arguments(rank, one, {});
    const ElasticDispatchResult result = buffer.dispatch_elastic(right, rank.call());
    const ElasticDispatchArguments again = cached_arguments({}, right, result);
    const auto refused = [&](const std::string& words, auto arguments, auto&& spoil) {
      spoil(arguments);
      require_throws<InvalidArgument>([&] { buffer.dispatch_elastic(arguments, rank.call()); }, {words}, words);
    };
    refused("number of tokens is 5", right, [](auto& call) { call.max_tokens = 4; });
    refused("num_experts is 0", right, [](auto& call) { call.num_experts = 0; });
    refused("expert_alignment is 0", right, [](auto& call) { call.expert_alignment = 0; });
    refused("stats", right,
            [&](auto& call) { call.stats = rank.upload(std::vector<std::int32_t>(3), DType::int32, {3}); });
    refused("topk_weights", right, [](auto& call) { call.topk_weights = call.x; });
    refused("number of tokens is 5", again, [](auto& call) { call.max_tokens = 4; });
    const auto refused_handle = [&](const std::string& words, auto&& spoil) {
      ElasticDispatchHandle handle = result.handle;
      spoil(handle);
      refused(words, again, [&](auto& call) { call.handle = &handle; });
    };
    refused("topk_idx", again, [](auto& call) { call.topk_idx = call.x; });
    refused_handle("local", [](auto& handle) { handle.local_topk_idx = handle.source_ends; });
    refused_handle("num_expanded is -1", [](auto& handle) { handle.num_expanded = -1; });
  });
}

}  // namespace
}  // namespace deep_ep::test
