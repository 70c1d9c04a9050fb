// Low-latency calls by rails against the oracle: nodes of all kinds, shapes, selections. What they do beside other
// calls is in rails_calls_test.cpp.
#include <optional>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/hosts_executor.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

using oracle::RowFormat;

constexpr Nodes kSeveralNodes[] = {{4, 2}, {6, 3}, {6, 2}, {8, 4}, {8, 2}};

class LowLatencyRailsTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailsTest);

// Sanitizers take up to a hundred times as long; what they can see is the same in fewer calls.
int rounds() { return under_sanitizer() ? 1 : 6; }
bool too_many(const Nodes& nodes) { return under_thread_sanitizer() && nodes.ranks > 4; }

TEST_P(LowLatencyRailsTest, CombineOfRandomShapes) {
  oracle::Random random(test_seed());
  for (const Nodes& nodes : kSeveralNodes) {
    std::vector<LowLatencyCombineCase> cases;
    for (int i = 0; i < rounds(); ++i) {
      const LowLatencyCaseShape shape = random_low_latency_shape(
          nodes.ranks, random.next(), {.tokens = 7, .many_tokens = 24, .hidden = 2560, .local_experts = 5});
      cases.push_back(make_low_latency_combine_case(shape, random.chance(0.2) ? 128 * (1 + random.below(9)) : 0));
    }
    if (missing(GetParam(), nodes.ranks).empty() && !too_many(nodes)) run_combines(cluster(nodes.ranks), nodes, cases);
  }
}

TEST_P(LowLatencyRailsTest, EveryFormat) {
  std::vector<LowLatencyCase> cases;
  for (const RowFormat format : oracle::kRowFormats) {
    for (const DType idx_dtype : {DType::int64, DType::int32}) {
      cases.push_back(make_low_latency_case({.tokens = {5, 0, 3, 4},
                                             .max_tokens = 5,
                                             .hidden = 1024,
                                             .format = format,
                                             .idx_dtype = idx_dtype,
                                             .seed = cases.size() + 1}));
    }
  }
  // The most words that there may be before the row.
  cases.push_back(make_low_latency_case({.tokens = {2, 2, 2, 2},
                                         .max_tokens = 2,
                                         .hidden = 128,
                                         .local_experts = 8,
                                         .topk = 32,
                                         .format = RowFormat::bf16}));
  run_dispatches(cluster(4), cases);
}

/// Far ranks have bits in two words. (Each takes a warp of every rank: there are not stacks enough for many more
/// ranks.)
TEST_P(LowLatencyRailsTest, ExhaustiveTwoNodesOfSeventeen) {
  run_combines(cluster(34), {34, 17},
               {make_low_latency_combine_case(
                   {.tokens = equal_tokens(34, 1), .max_tokens = 1, .hidden = 128, .local_experts = 1})});
}

/// The model looks at the room for tokens, which is the same on all ranks, and not at how many there are.
TEST_P(LowLatencyRailsTest, AutomaticIsByRailsWhereTheyPay) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "has no threads that the other tests have not";
  const Setting not_set("DEEP_EP_LOW_LATENCY_RAILS", std::nullopt);
  const Nodes nodes{4, 2};
  const LowLatencyCaseShape shape{
      .tokens = {8, 6, 7, 8}, .max_tokens = 8, .hidden = 512, .local_experts = 2, .topk = 6};
  LowLatencyCaseShape roomy = shape;
  roomy.max_tokens = 640;
  const LowLatencyCombineCase few = make_low_latency_combine_case(shape), many = make_low_latency_combine_case(roomy);
  const Combined of_few = few.expected(nodes.ranks_per_node);
  run_cluster(cluster(4), [&](Rank& rank) {
    BufferOptions options = rail_options(nodes, roomy.max_tokens, shape.hidden);
    options.timeout_s = patience();
    Buffer buffer(rank.bootstrap(), rank.executor(), options);  // Rank::buffer would ask for rails
    combine_twice(rank, buffer, few, of_few, dispatch_low_latency(rank, buffer, few));
    combine_twice(rank, buffer, many, many.expected(2), dispatch_low_latency(rank, buffer, many));
    buffer.check();
    buffer.destroy();
  });
}

/// Calls that cannot go by rails, or may not, are calls like any other.
TEST_P(LowLatencyRailsTest, WhereTheyAreNotPossible) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "has no threads that the other tests have not";
  const Nodes nodes{4, 2};
  const auto one = make_low_latency_combine_case({.tokens = {6, 6, 5, 6}, .max_tokens = 6, .hidden = 512});
  run_cluster(cluster(4), [&](Rank& rank) {
    BufferOptions masking = rail_options(nodes, 6, 512);
    masking.low_latency.masking = true;
    BufferOptions never = rail_options(nodes, 6, 512);
    never.low_latency.rails = LowLatencyRails::never;
    BufferOptions no_nvlink = rail_options(nodes, 6, 512);
    no_nvlink.low_latency.allow_nvlink = false;
    const std::vector<std::pair<BufferOptions, const char*>> cases = {{masking, "as ranks may be masked"},
                                                                      {never, "as asked for"},
                                                                      {no_nvlink, "as NVLink is not allowed"},
                                                                      {rail_options({4, 1}, 6, 512), "two or more"},
                                                                      {rail_options({4, 4}, 6, 512), "one node"}};
    for (const auto& [options, why] : cases) {
      Buffer& buffer = rank.buffer(options);
      require(buffer.describe().find(why) != std::string::npos, std::string(why) + " in: " + buffer.describe());
      const auto dispatched = dispatch_and_check(rank, buffer, one.before);
      const bool several = buffer.num_nodes() > 1;
      combine_twice(rank, buffer, one, one.expected(several ? options.ranks_per_node : 0), dispatched.handle);
      buffer.check();
      buffer.destroy();
    }
  });
}

/// As in a real cluster, no address leads to the heap of another host.
TEST(LowLatencyRailsOfHosts, KernelsUseHeapsOfTheirOwnHostAlone) {
  const Nodes nodes{4, 2};
  const auto one = make_low_latency_combine_case({.tokens = {5, 3, 4, 6}, .max_tokens = 6, .hidden = 256});
  ClusterOptions cluster{.ranks = nodes.ranks, .host = {.multiprocessors = 2, .warps_per_block = 4}};
  run_cluster(cluster, [&](Rank& rank) {
    BufferOptions options = rail_options(nodes, 6, 256);
    options.low_latency.rails = LowLatencyRails::always;
    const auto host = [&](int of) { return nodes.node_of(of); };
    Buffer buffer(rank.bootstrap(), std::make_shared<HostsExecutor>(rank.executor(), rank.rank(), host), options);
    const auto dispatched = dispatch_and_check(rank, buffer, one.before);
    combine_twice(rank, buffer, one, one.expected(2), dispatched.handle);
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
