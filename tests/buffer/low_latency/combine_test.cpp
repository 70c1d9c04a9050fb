// Low-latency combine against the oracle: shapes, selections, formats.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

namespace deep_ep::test {
namespace {

using oracle::Routing;

class LowLatencyCombineTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyCombineTest);

TEST_P(LowLatencyCombineTest, RandomShapes) {
  oracle::Random random(test_seed());
  for (const int ranks : {1, 2, 3, 5, 8}) {
    if (under_thread_sanitizer() && ranks > 5) continue;
    if (!missing(GetParam(), ranks).empty()) continue;
    std::vector<LowLatencyCombineCase> cases;
    for (int i = 0; i < (under_thread_sanitizer() ? 2 : 5); ++i) {
      const LowLatencyCaseShape shape = random_low_latency_shape(
          ranks, random.next(), {.tokens = 8, .many_tokens = 16, .hidden = 1024, .local_experts = 6});
      cases.push_back(make_low_latency_combine_case(shape, random.chance(0.3) ? 128 * (1 + random.below(9)) : 0));
    }
    ClusterOptions options = cluster(ranks);
    options.host.warps_per_block = ranks < 3 ? 20 : ranks == 3 ? 9 : 1;
    run_combines(options, {ranks, ranks_per_node_of(GetParam().topology, ranks)}, cases, {0, 2});
  }
}

TEST_P(LowLatencyCombineTest, EveryTopkAndWidth) {
  std::vector<LowLatencyCombineCase> cases;
  for (const auto& [topk, hidden] :
       ends_of<std::pair<int, std::int64_t>>({{1, 128}, {2, 8192}, {8, 1024}, {9, 1152}, {17, 4096}, {32, 7168}})) {
    for (const Routing routing : {Routing::uniform, Routing::duplicates}) {
      cases.push_back(make_low_latency_combine_case({.tokens = {4, 5},
                                                     .max_tokens = 5 * topk,
                                                     .hidden = 256,
                                                     .local_experts = 20,
                                                     .topk = topk,
                                                     .routing = routing,
                                                     .seed = cases.size() + 1},
                                                    hidden));
    }
  }
  run_combines(cluster(2), {2, 0}, cases);
}

TEST_P(LowLatencyCombineTest, SelectionsThatHaveGone) {
  std::vector<LowLatencyCombineCase> cases;
  for (const double share : ends_of({0.2, 0.7, 1.0})) {
    for (const Routing routing : {Routing::uniform, Routing::duplicates}) {
      auto one = make_low_latency_combine_case({.tokens = {9, 6, 4},
                                                .max_tokens = 54,
                                                .hidden = 128,
                                                .topk = 6,
                                                .routing = routing,
                                                .seed = cases.size() + 1});
      change_selections(one, share, cases.size());
      cases.push_back(std::move(one));
    }
  }
  run_combines(cluster(3), {3, 0}, cases);
}

/// A large term that another one cancels takes the small one along, unless that is added last.
TEST_P(LowLatencyCombineTest, RowsAreAddedInTheOrderOfTheRanks) {
  auto one = make_low_latency_combine_case(
      {.tokens = {2, 3, 1}, .max_tokens = 3, .hidden = 128, .local_experts = 1, .topk = 3});
  constexpr std::uint16_t kTerms[] = {0x4d00, 0xcd00, 0x3f80};  // 2^27, -2^27, 1
  for (std::size_t r = 0; r < one.inputs.size(); ++r) {
    std::ranges::fill(one.inputs[r].x, kTerms[r]);
    std::ranges::fill(one.inputs[r].selection.weights, 1.0f);
  }
  run_combines(cluster(3), {3, 0}, {one});
}

}  // namespace
}  // namespace deep_ep::test
