// Dispatch and combine of the second interface, bit for bit against plain loops.
#include "tests/buffer/elastic/combine_case.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/marking_executor.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep::test {
namespace {

class ElasticTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticTest);

/// With and without everything that has code of its own.
std::vector<ElasticCase> elastic_kinds(const std::vector<std::int64_t>& tokens, int topk) {
  std::vector<ElasticCase> kinds;
  for (int number = 0; number < 12; ++number) {
    const ElasticKind kind{.exact = number % 2 == 0,
                           .expand = number % 3 != 0,
                           .weights = number % 4 != 1,
                           .stats = number % 3 == 1,
                           .copy = number % 5 == 0,
                           .column_major = number % 4 == 2,
                           .each_selection = number % 3 == 2,
                           .combine_weights = number % 3 != 2 && number % 2 == 0,
                           .gaps = number % 3 != 0 && number >= 6};
    kinds.push_back(make_elastic_case(
        make_case({.tokens = tokens,
                   .local_experts = number % 4 == 3 ? 40 : 3,
                   .topk = topk,
                   .idx_dtype = number % 2 == 0 ? DType::int64 : DType::int32,
                   .routing = number == 10 ? oracle::Routing::duplicates
                                           : oracle::kRoutings[std::size_t(number) % std::size(oracle::kRoutings)],
                   .dtype = number % 2 == 0 ? DType::bfloat16 : DType::uint8,
                   .hidden = number % 3 == 2 ? 1040 : 80,
                   .scales = number % 4 == 0   ? 0
                             : number % 4 == 1 ? 5
                                               : 140,
                   .scale_dtype = DType::int32,
                   .scale_layout = kScaleLayouts[std::size_t(number) % std::size(kScaleLayouts)],
                   .alignment = number == 7       ? 100
                                : number % 2 == 0 ? 1
                                                  : 16,
                   .combine_hidden = number % 2 == 0 ? 72 : 1032,
                   .bias_0 = number % 4 % 2 == 1,
                   .bias_1 = number % 4 >= 2,
                   .seed = std::uint64_t(number) + 1}),
        kind));
  }
  return kinds;
}

/// A dispatch, one with its handle, and a combine of each, whose sums some make later.
void run_kinds(const ClusterOptions& options, const std::vector<ElasticCase>& kinds,
               const BufferOptions& buffer_options, int num_sms = 0) {
  run_cluster(options, [&](Rank& rank) {
    // Memory that a kernel leaves alone is not zero, and names rows that are not there.
    Buffer buffer(rank.bootstrap(), std::make_shared<MarkingExecutor>(rank.executor()), buffer_options);
    for (const Tensor& piece : take_whole_heap(rank, buffer)) {
      rank.executor()->fill(piece.view().data, 1, piece.view().bytes(), rank.stream());
    }
    rank.executor()->synchronize(rank.stream());
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const auto& [one, kind, sides] = kinds[i];
      ElasticDispatchArguments arguments = elastic_arguments(rank, one, kind);
      arguments.num_sms = num_sms;
      const ElasticDispatchResult result = buffer.dispatch_elastic(arguments, rank.call());
      check_elastic(rank, one, kind, result);
      ElasticDispatchArguments cached = cached_arguments(kind, arguments, result);
      cached.num_sms = num_sms;
      check_elastic_rows(rank, one, kind, buffer.dispatch_elastic(cached, rank.call()));
      ElasticCombineArguments combine = upload_elastic(rank, kinds[i], arguments, result.handle);
      combine.num_sms = num_sms;
      if (i % 4 < 2) {
        check_elastic(rank, kinds[i], buffer.combine_elastic(combine, rank.call()));
      } else {
        const ElasticReturn back = buffer.begin_combine_elastic(combine, rank.call());
        buffer.barrier(rank.call());
        check_elastic(rank, kinds[i], buffer.end_combine_elastic(back, rank.call()));
      }
      rank.release();
    }
    buffer.destroy();
  });
}

TEST_P(ElasticTest, EveryKind) {
  run_kinds(cluster(3), elastic_kinds({70, 0, 37}, 6), {.heap_bytes = 16 * kMiB});
  const Case in_pieces = make_case({.tokens = {3, 0, 2}, .hidden = 18000});
  const Case gaps_of_many_scales =
      make_case({.tokens = {3, 0, 2}, .scales = 140, .scale_dtype = DType::int32, .alignment = 16});
  run_kinds(cluster(3),
            {make_elastic_case(in_pieces, {.expand = true}), make_elastic_case(gaps_of_many_scales, {.expand = true})},
            {.heap_bytes = 16 * kMiB});
}

TEST_P(ElasticTest, MoreRanksThanSelections) {
  run_kinds(cluster(4), elastic_kinds({9, 12, 0, 7}, 2), {.heap_bytes = 16 * kMiB});
}

TEST_P(ElasticTest, ManyTokensAreNumberedByManyBlocks) {
  ClusterOptions options = cluster(2);
  options.host = {.multiprocessors = 6, .warps_per_block = 4};
  const Case one = make_case(
      {.tokens = {900, 1100}, .local_experts = 5, .topk = 8, .hidden = 16, .alignment = 8, .combine_hidden = 8});
  run_kinds(options,
            {make_elastic_case(one, {.stats = true}), make_elastic_case(one, {.exact = false, .expand = true})},
            {.heap_bytes = 16 * kMiB}, 2);
}

TEST_P(ElasticTest, OneMultiprocessorSendsAndNumbers) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "a device with one multiprocessor";
  ClusterOptions options = cluster(2);
  options.host = {.multiprocessors = 1, .warps_per_block = 2};
  // Many selections, which do not lie in the control window.
  const Case many =
      make_case({.tokens = {1900, 2100}, .local_experts = 5, .topk = 16, .hidden = 16, .combine_hidden = 8});
  run_kinds(options, {make_elastic_case(many, {.expand = true})}, {.heap_bytes = 16 * kMiB});
  run_kinds(options, elastic_kinds({20, 31}, 5), {.heap_bytes = 16 * kMiB});
}

TEST_P(ElasticTest, ManySelectionsOfOneRank) {
  Shape shape{.tokens = {6, 8},
              .local_experts = 1,
              .topk = 32,
              .routing = oracle::Routing::skewed,
              .combine_hidden = 520,
              .bias_0 = true,
              .bias_1 = true};
  const Case one = make_case(shape);
  shape.bias_0 = shape.bias_1 = false;
  shape.seed = 2;
  run_kinds(cluster(2),
            {make_elastic_case(one, {.expand = true}),
             make_elastic_case(make_case(shape), {.expand = true, .each_selection = true})},
            {.heap_bytes = 16 * kMiB});
}

TEST_P(ElasticTest, WarpsShareFewRows) {
  ClusterOptions options = cluster(2);
  options.host.warps_per_block = 8;
  // Rows of three pieces, for teams of two, four and eight warps.
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{4, 3}, {2, 2}, {1, 1}}) {
    run_kinds(options, elastic_kinds(tokens, 6), {.heap_bytes = 16 * kMiB}, 1);
  }
}

TEST_P(ElasticTest, AWindowForAFewTokensTakesPasses) {
  // Rows of combine have 2176 bytes: room for 4 tokens of all ranks, or for 1 of four selections.
  run_kinds(cluster(3), elastic_kinds({70, 0, 37}, 4), {.heap_bytes = 4 * kMiB, .window_bytes = 30 * kKiB});
}

TEST_P(ElasticTest, BetweenNodes) {
  BufferOptions options{.heap_bytes = 16 * kMiB, .ranks_per_node = 2};
  run_kinds(cluster(4), elastic_kinds({17, 0, 40, 9}, 6), options);
  options.ranks_per_node = 1;
  const Case one = make_case(
      {.tokens = {900, 700}, .local_experts = 5, .topk = 16, .hidden = 16, .alignment = 8, .combine_hidden = 8});
  run_kinds(cluster(2),
            {make_elastic_case(one, {.stats = true}), make_elastic_case(one, {.exact = false, .expand = true})},
            options);
}

TEST_P(ElasticTest, EveryScheduleGivesTheSame) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "schedules are the CPU executor's";
  const auto kinds = elastic_kinds({9, 0, 13}, 3);
  const auto few = elastic_kinds({1, 0, 1}, 3);  // warps share a row, and some blocks only add
  const ElasticCase many = make_elastic_case(
      make_case({.tokens = {140, 190, 40}, .local_experts = 5, .topk = 31, .hidden = 16, .combine_hidden = 8}), {});
  under_schedules({.usually = 10, .sanitized = 2, .thread_sanitized = 1}, [&](std::uint64_t seed) {
    ClusterOptions options = cluster(3);
    options.host = {.multiprocessors = 2, .warps_per_block = seed % 2 == 0 ? 3 : 6, .seed = seed};
    // Room for 4 of the wide rows of each rank.
    const BufferOptions small{.heap_bytes = 4 * kMiB, .window_bytes = 26 * kKiB};
    // ThreadSanitizer keeps a history of each thread until its cluster goes, and has memory for those of a few kinds.
    const std::size_t at_once = under_thread_sanitizer() ? 2 : kinds.size();
    const auto run = [&](const std::vector<ElasticCase>& all, int num_sms) {
      for (auto next = all.begin(); next < all.end(); next += std::ptrdiff_t(at_once)) {
        run_kinds(options, {next, next + std::ptrdiff_t(at_once)}, small, num_sms);
      }
    };
    run(few, 1);
    options.host = {.multiprocessors = 4, .warps_per_block = 3, .seed = seed};
    run(kinds, 2);
    run_kinds(options, {many}, {.heap_bytes = 4 * kMiB}, 2);
    // A block for each step: one tells, some send, one numbers and receives.
    options.host.multiprocessors = 8;
    run_kinds(options, {kinds.begin(), kinds.begin() + (under_thread_sanitizer() ? 1 : 4)}, {.heap_bytes = 4 * kMiB},
              7);
  });
}

}  // namespace
}  // namespace deep_ep::test
