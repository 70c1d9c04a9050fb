// Low-latency combine against the oracle: shapes, selections, formats.
#include <algorithm>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

using oracle::Routing;

class LowLatencyCombineTest : public ClusterTest {
 protected:
  /// A dispatch and two combines of each case, one after the other on one buffer; `configs` in turn.
  void run(const ClusterOptions& options, const std::vector<LowLatencyCombineCase>& cases,
           const std::vector<Config>& configs = {{}}) const {
    std::int64_t max_tokens = 1;
    std::int64_t hidden = 1;
    std::vector<std::vector<oracle::LowLatencyCombined>> expected;
    for (const LowLatencyCombineCase& one : cases) {
      max_tokens = std::max(max_tokens, one.before.shape.max_tokens);
      hidden = std::max({hidden, one.hidden, one.before.shape.hidden});
      expected.push_back(one.expected());
    }
    run_cluster(options, [&](Rank& rank) {
      Buffer& buffer = rank.buffer(low_latency_options(rank.size(), max_tokens, hidden));
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, cases[i]);
        LowLatencyCombineArguments arguments = upload_combine(rank, cases[i], handle);
        arguments.config = configs[i % configs.size()];
        const Tensor first = buffer.low_latency_combine(arguments, rank.call()).combined_x;
        const Tensor second = buffer.low_latency_combine(arguments, rank.call()).combined_x;
        check_low_latency_combine(rank, cases[i], expected[i], first.view());
        require_same(rank.download<std::uint16_t>(first.view()), rank.download<std::uint16_t>(second.view()),
                     "the second combine", cases[i].hidden);
        rank.release();
      }
      buffer.check();
      buffer.destroy();
    });
  }
};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyCombineTest);

TEST_P(LowLatencyCombineTest, RandomShapes) {
  oracle::Random random(test_seed());
  for (const int ranks : {1, 2, 3, 5, 8}) {
    if (under_thread_sanitizer() && ranks > 5) continue;
    if (!missing(GetParam(), ranks).empty()) continue;
    std::vector<LowLatencyCombineCase> cases;
    for (int i = 0; i < (under_thread_sanitizer() ? 2 : 5); ++i) {
      const std::int64_t most = 1 + random.below(8);
      LowLatencyCaseShape shape{
          .tokens = oracle::make_token_counts(random.pick(oracle::kTokenCounts), ranks, most, random.next()),
          .max_tokens = most + random.below(3),
          .hidden = 128 * (1 + random.below(6)),
          .local_experts = static_cast<int>(1 + random.below(6)),
          .topk = static_cast<int>(1 + random.below(10)),
          .routing = random.pick(oracle::kRoutings)};
      shape.idx_dtype = random.chance(0.5) ? DType::int64 : DType::int32;
      shape.seed = random.next();
      // A token that names an expert twice takes two of its rows.
      shape.max_tokens *= shape.topk;
      cases.push_back(make_low_latency_combine_case(shape, random.chance(0.3) ? 128 * (1 + random.below(9)) : 0));
    }
    run(cluster(ranks), cases,
        {{}, {.num_sms = 2, .warps_per_block = 1}, {.num_sms = 2, .warps_per_block = 9}, {.warps_per_block = 20}});
  }
}

TEST_P(LowLatencyCombineTest, EveryTopkAndWidth) {
  DEEP_EP_NEEDS_RANKS(2);
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
  run(cluster(2), cases);
}

TEST_P(LowLatencyCombineTest, SelectionsThatHaveGone) {
  DEEP_EP_NEEDS_RANKS(3);
  std::vector<LowLatencyCombineCase> cases;
  for (const double share : ends_of({0.2, 0.7, 1.0})) {
    for (const Routing routing : {Routing::uniform, Routing::duplicates}) {
      auto one = make_low_latency_combine_case({.tokens = {9, 6, 4},
                                                .max_tokens = 54,
                                                .hidden = 128,
                                                .topk = 6,
                                                .routing = routing,
                                                .seed = cases.size() + 1});
      oracle::Random random(cases.size());
      for (auto& input : one.inputs) {
        oracle::Selection& now = input.selection;
        for (std::int64_t t = 0; t < now.tokens; ++t) {
          const auto row = now.idx.begin() + t * now.topk;
          // Weights may be others than at dispatch.
          for (int k = 0; k < now.topk; ++k) {
            now.weights[static_cast<std::size_t>(t * now.topk + k)] *= -1.5f;
            if (random.chance(share)) row[k] = -1 - random.below(3);
          }
        }
      }
      cases.push_back(std::move(one));
    }
  }
  run(cluster(3), cases);
}

/// A large term that another one cancels takes the small one along, unless that is added last.
TEST_P(LowLatencyCombineTest, RowsAreAddedInTheOrderOfTheRanks) {
  DEEP_EP_NEEDS_RANKS(3);
  auto one = make_low_latency_combine_case(
      {.tokens = {2, 3, 1}, .max_tokens = 3, .hidden = 128, .local_experts = 1, .topk = 3});
  constexpr std::uint16_t kTerms[] = {0x4d00, 0xcd00, 0x3f80};  // 2^27, -2^27, 1
  for (std::size_t r = 0; r < one.inputs.size(); ++r) {
    std::ranges::fill(one.inputs[r].x, kTerms[r]);
    std::ranges::fill(one.inputs[r].selection.weights, 1.0f);
  }
  run(cluster(3), {one});
}

}  // namespace
}  // namespace deep_ep::test
