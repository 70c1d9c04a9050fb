// Dispatch of the second interface, bit for bit against plain loops.
#include <chrono>
#include <thread>

#include "tests/buffer/elastic/dispatch_case.hpp"
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/late_block_executor.hpp"
#include "tests/cluster/marking_executor.hpp"

namespace deep_ep::test {
namespace {

class ElasticDispatchTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticDispatchTest);

/// With and without everything that has code of its own.
std::vector<std::pair<Case, ElasticKind>> dispatch_kinds(const std::vector<std::int64_t>& tokens, int topk) {
  std::vector<std::pair<Case, ElasticKind>> kinds;
  for (int number = 0; number < 12; ++number) {
    const ElasticKind kind{.exact = number % 2 == 0,
                           .expand = number % 3 == 0,
                           .weights = number % 4 != 1,
                           .stats = number % 3 == 1,
                           .copy = number % 5 == 0,
                           .column_major = number % 4 == 2};
    kinds.emplace_back(make_case({.tokens = tokens,
                                  .local_experts = number % 4 == 3 ? 40 : 3,
                                  .topk = topk,
                                  .idx_dtype = number % 2 == 0 ? DType::int64 : DType::int32,
                                  .routing = oracle::kRoutings[std::size_t(number) % std::size(oracle::kRoutings)],
                                  .dtype = number % 2 == 0 ? DType::bfloat16 : DType::uint8,
                                  .hidden = number % 3 == 2 ? 1040 : 80,
                                  .scales = number % 4 == 0   ? 0
                                            : number % 4 == 1 ? 5
                                                              : 140,
                                  .scale_dtype = DType::int32,
                                  .scale_layout = kScaleLayouts[std::size_t(number) % std::size(kScaleLayouts)],
                                  .alignment = number == 9       ? 100
                                               : number % 2 == 0 ? 1
                                                                 : 16,
                                  .seed = std::uint64_t(number) + 1}),
                       kind);
  }
  return kinds;
}

void run_kinds(const ClusterOptions& options, const std::vector<std::pair<Case, ElasticKind>>& kinds,
               const BufferOptions& buffer_options, int num_sms = 0) {
  run_cluster(options, [&](Rank& rank) {
    // Memory that a kernel leaves alone is not zero.
    Buffer buffer(rank.bootstrap(), std::make_shared<MarkingExecutor>(rank.executor()), buffer_options);
    for (const Tensor& piece : take_whole_heap(rank, buffer)) {
      rank.executor()->fill(piece.view().data, 1, piece.view().bytes(), rank.stream());
    }
    rank.executor()->synchronize(rank.stream());
    for (const auto& [one, kind] : kinds) {
      ElasticDispatchArguments arguments = elastic_arguments(rank, one, kind);
      arguments.num_sms = num_sms;
      const ElasticDispatchResult result = buffer.dispatch_elastic(arguments, rank.call());
      check_elastic(rank, one, kind, result);
      ElasticDispatchArguments cached = cached_arguments(kind, arguments, result);
      cached.num_sms = num_sms;
      check_elastic_rows(rank, one, kind, buffer.dispatch_elastic(cached, rank.call()));
      rank.release();
    }
    buffer.destroy();
  });
}

constexpr std::size_t kMebibyte = std::size_t{1} << 20;

TEST_P(ElasticDispatchTest, EveryKind) {
  DEEP_EP_NEEDS_RANKS(3);
  run_kinds(cluster(3), dispatch_kinds({70, 0, 37}, 6), {.heap_bytes = 16 * kMebibyte});
  const Case in_pieces = make_case({.tokens = {3, 0, 2}, .hidden = 18000});
  const Case gaps_of_many_scales =
      make_case({.tokens = {3, 0, 2}, .scales = 140, .scale_dtype = DType::int32, .alignment = 16});
  run_kinds(cluster(3), {{in_pieces, {.expand = true}}, {gaps_of_many_scales, {.expand = true}}},
            {.heap_bytes = 16 * kMebibyte});
}

TEST_P(ElasticDispatchTest, ManyTokensAreNumberedByManyBlocks) {
  DEEP_EP_NEEDS_RANKS(2);
  ClusterOptions options = cluster(2);
  options.host = {.multiprocessors = 6, .warps_per_block = 4};
  const Case one = make_case({.tokens = {900, 1100}, .local_experts = 5, .topk = 8, .hidden = 16, .alignment = 8});
  run_kinds(options, {{one, {.stats = true}}, {one, {.exact = false, .expand = true}}}, {.heap_bytes = 16 * kMebibyte},
            2);
}

TEST_P(ElasticDispatchTest, OneMultiprocessorSendsAndNumbers) {
  DEEP_EP_NEEDS_RANKS(2);
  if (GetParam().target != Target::host) GTEST_SKIP() << "a device with one multiprocessor";
  ClusterOptions options = cluster(2);
  options.host = {.multiprocessors = 1, .warps_per_block = 2};
  // Many selections, which do not lie in the control window.
  const Case many = make_case({.tokens = {1900, 2100}, .local_experts = 5, .topk = 16, .hidden = 16});
  run_kinds(options, {{many, {.expand = true}}}, {.heap_bytes = 16 * kMebibyte});
  run_kinds(options, dispatch_kinds({20, 31}, 5), {.heap_bytes = 16 * kMebibyte});
}

TEST_P(ElasticDispatchTest, AWindowForAFewTokensTakesPasses) {
  DEEP_EP_NEEDS_RANKS(3);
  run_kinds(cluster(3), dispatch_kinds({70, 0, 37}, 4),
            {.heap_bytes = 4 * kMebibyte, .window_bytes = std::size_t{30} << 10});
}

TEST_P(ElasticDispatchTest, BetweenNodes) {
  DEEP_EP_NEEDS_RANKS(4);
  BufferOptions options{.heap_bytes = 16 * kMebibyte, .ranks_per_node = 2};
  run_kinds(cluster(4), dispatch_kinds({17, 0, 33, 9}, 4), options);
  options.ranks_per_node = 1;
  const Case one = make_case({.tokens = {900, 700}, .local_experts = 5, .topk = 16, .hidden = 16, .alignment = 8});
  run_kinds(cluster(2), {{one, {.stats = true}}, {one, {.exact = false, .expand = true}}}, options);
}

TEST_P(ElasticDispatchTest, BetweenNodesWithoutRoomInTheHeap) {
  DEEP_EP_NEEDS_RANKS(4);
  const Case one = make_case({.tokens = {13, 0, 30, 9}, .hidden = 1800, .scales = 3, .ranks_per_node = 2});
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer =
        rank.buffer({.heap_bytes = 8 * kMebibyte, .window_bytes = std::size_t{256} << 10, .ranks_per_node = 2});
    std::vector<Tensor> hoard;
    if (rank.rank() != 2) hoard = take_whole_heap(rank, buffer);
    const ElasticKind kind{.expand = true};
    const ElasticDispatchArguments arguments = elastic_arguments(rank, one, kind);
    const ElasticDispatchResult result = buffer.dispatch_elastic(arguments, rank.call());
    check_elastic(rank, one, kind, result);
    check_elastic_rows(rank, one, kind,
                       buffer.dispatch_elastic(cached_arguments(kind, arguments, result), rank.call()));
    hoard.clear();
    buffer.destroy();
  });
}

TEST_P(ElasticDispatchTest, EveryScheduleGivesTheSame) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "schedules are the CPU executor's";
  const auto kinds = dispatch_kinds({9, 0, 13}, 3);
  const Case many = make_case({.tokens = {140, 190, 40}, .local_experts = 5, .topk = 31, .hidden = 16});
  under_schedules({.usually = 10, .sanitized = 2}, [&](std::uint64_t seed) {
    ClusterOptions options = cluster(3);
    options.host = {.multiprocessors = 4, .warps_per_block = 3, .seed = seed};
    run_kinds(options, kinds, {.heap_bytes = 4 * kMebibyte, .window_bytes = std::size_t{24} << 10}, 2);
    run_kinds(options, {{many, {}}}, {.heap_bytes = 4 * kMebibyte}, 2);
    // A block for each step: one tells, some send, one numbers and receives.
    options.host.multiprocessors = 8;
    run_kinds(options, {kinds.begin(), kinds.begin() + 4}, {.heap_bytes = 4 * kMebibyte}, 7);
  });
}

TEST_P(ElasticDispatchTest, RanksThatDisagreeLearnOfIt) {
  DEEP_EP_NEEDS_RANKS(2);
  // Few selections are told before ranks have met, many into windows.
  const Case few = make_case({.tokens = {20, 5}, .local_experts = 4, .hidden = 80});
  const Case many = make_case({.tokens = {2100, 5}, .local_experts = 4, .hidden = 16});
  const std::string words[] = {"dispatch: maximum of tokens of a rank is", "dispatch: number of experts is",
                               "dispatch: topk_weights is", "of a dispatch 1 with a handle) is"};
  for (const Case* one : {&few, &many}) {
    for (int change = 0; change < 4; ++change) {
      run_cluster(cluster(2), [&](Rank& rank) {
        Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMebibyte});
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
  DEEP_EP_NEEDS_RANKS(3);
  const Case one = make_case({.tokens = {5, 6, 4}, .local_experts = 4, .hidden = 80});
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMebibyte});
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
                    {.heap_bytes = 8 * kMebibyte});
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
  DEEP_EP_NEEDS_RANKS(2);
  if (GetParam().target != Target::host) GTEST_SKIP() << "memory that the test has marked";
  const Case one = make_case({.tokens = {9, 6}, .local_experts = 4, .hidden = 80, .scales = 4, .alignment = 16});
  for (const int ranks_per_node : {2, 1}) {
    for (const bool expand : {false, true}) {
      run_cluster(cluster(2), [&](Rank& rank) {
        Buffer buffer(rank.bootstrap(), std::make_shared<MarkingExecutor>(rank.executor()),
                      {.heap_bytes = 8 * kMebibyte, .ranks_per_node = ranks_per_node});
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
  DEEP_EP_NEEDS_RANKS(3);
  const Case one = make_case({.tokens = {5, 6, 7}});
  run_cluster(cluster_with_absentees(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMebibyte, .timeout_s = short_deadline()});
    if (rank.rank() != 2) {
      require_throws<TimeoutError>([&] { buffer.dispatch_elastic(elastic_arguments(rank, one, {}), rank.call()); },
                                   {"for rank 2", "where it wants its rows (dispatch kernel)"}, "dispatch");
    }
    rank.bootstrap()->barrier();
  });
}

TEST_P(ElasticDispatchTest, WrongArgumentsAreNamed) {
  DEEP_EP_NEEDS_RANKS(1);
  const Case one = make_case({.tokens = {5}, .scales = 2});
  run_with_buffers(cluster(1), {.heap_bytes = 8 * kMebibyte}, [&](Rank& rank, Buffer& buffer) {
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
