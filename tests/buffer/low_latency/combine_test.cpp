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

/// All bits that travel count, whatever way rows take.
TEST_P(LowLatencyCombineTest, SumsOfEveryKind) {
  constexpr std::pair<LowLatencySums, int> kKinds[] = {
      {LowLatencySums::fp24, 24}, {LowLatencySums::fp32, 32}, {LowLatencySums::bf16, 16}};
  for (const auto& [sums, bits] : kKinds) {
    auto one = make_low_latency_combine_case(
        {.tokens = {6, 5, 0, 7}, .max_tokens = 7, .hidden = 1152, .local_experts = 2, .topk = 5});
    one.options.sum_bits = bits;
    const Combined expected = one.expected(ranks_per_node_of(GetParam().topology, 4));
    BufferOptions options = low_latency_options(4, 7, 1152);
    options.low_latency.sums = sums;
    options.low_latency.bytes *= 2;
    run_with_buffers(cluster(4), options, [&](Rank& rank, Buffer& buffer) {
      for (const bool weights : {false, true}) {
        const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, weights);
        for (const bool hook : {false, true}) {
          const auto arguments = with_hook(upload_combine(rank, one, handle), hook);
          const auto result = received(buffer.low_latency_combine(arguments, rank.call()));
          check_low_latency_combine(rank, one, expected, result.combined_x.view());
        }
      }
    });
  }
}

/// A NaN stays alone, an infinity keeps its sign, whatever travels of a sum.
TEST_P(LowLatencyCombineTest, ChannelsThatAreNotFinite) {
  auto one =
      make_low_latency_combine_case({.tokens = {2, 3}, .max_tokens = 3, .hidden = 128, .local_experts = 2, .topk = 4});
  for (auto& input : one.inputs) {
    std::ranges::fill(input.selection.weights, 1.0f);
    for (std::size_t i = 0; i < input.x.size(); i += 8) {
      input.x[i] = 0x7fff;      // NaN
      input.x[i + 1] = 0x7f80;  // infinity
      input.x[i + 2] = 0xff80;
    }
  }
  run_with_buffers(cluster(2), low_latency_options(2, 3, 128), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    for (const bool hook : {false, true}) {
      const auto arguments = with_hook(upload_combine(rank, one, handle), hook);
      const auto result = received(buffer.low_latency_combine(arguments, rank.call()));
      const auto seen = rank.download<std::uint16_t>(result.combined_x.view());
      for (std::size_t i = 0; i < seen.size(); ++i) {
        const bool finite = (seen[i] & 0x7f80) != 0x7f80;
        require(finite == (i % 8 > 2), "channel " + std::to_string(i) + " is " + std::to_string(seen[i]));
        if (i % 8 == 0) require((seen[i] & 0x7f) != 0, "a NaN");
        if (i % 8 == 1) require(seen[i] == 0x7f80, "an infinity");
        if (i % 8 == 2) require(seen[i] == 0xff80, "a negative infinity");
      }
    }
  });
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
