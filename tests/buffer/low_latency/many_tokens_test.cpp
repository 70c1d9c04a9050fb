// Low-latency calls of prefill steps among decode steps: 1024 tokens a rank, in every form, over every way.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

constexpr std::int64_t kManyTokens = 1024;

LowLatencyCaseShape many_tokens(oracle::RowFormat format, LowLatencyLayout layout) {
  return {.tokens = {kManyTokens, 7},  // a rank that only decodes
          .max_tokens = kManyTokens,
          .hidden = format == oracle::RowFormat::fp8_ue8m0 ? 512 : 128,
          .local_experts = 4,
          .topk = 4,
          .format = format,
          .layout = layout};
}

class LowLatencyManyTokensTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyManyTokensTest);

TEST_P(LowLatencyManyTokensTest, EveryForm) {
  DEEP_EP_NEEDS_RANKS(2);
  const bool mixed = GetParam().topology == Topology::two_nodes;
  if (under_thread_sanitizer() || (under_sanitizer() && mixed)) GTEST_SKIP() << "as with few tokens, and slow";
  using oracle::RowFormat;
  std::vector<LowLatencyCase> formats;
  formats.push_back(make_low_latency_case(many_tokens(RowFormat::fp8, LowLatencyLayout::expert_major)));
  formats.push_back(make_low_latency_case(many_tokens(RowFormat::fp8_ue8m0, LowLatencyLayout::rank_major)));
  formats.push_back(make_low_latency_case(many_tokens(RowFormat::nvfp4, LowLatencyLayout::expert_major)));
  std::vector<LowLatencyCombineCase> combines;
  for (const auto layout : {LowLatencyLayout::expert_major, LowLatencyLayout::rank_major}) {
    combines.push_back(make_low_latency_combine_case(many_tokens(RowFormat::bf16, layout)));
  }
  combines.push_back(combines[0]);
  combines.back().options.fp8 = true;
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, kManyTokens, 512));
    for (const LowLatencyCase& one : formats) {
      dispatch_and_check(rank, buffer, one);
      rank.release();
    }
    for (const LowLatencyCombineCase& one : combines) {
      const LowLatencyHandle handle = dispatch_and_check(rank, buffer, one.before).handle;
      const LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
      const LowLatencyCombineResult whole = buffer.low_latency_combine(arguments, rank.call());
      check_low_latency_combine(rank, one, one.expected(), whole.combined_x.view());
      const LowLatencyCombineResult hooked = buffer.low_latency_combine(with_hook(arguments), rank.call());
      hooked.hook();
      check_low_latency_combine(rank, one, one.expected_with_hooks(GetParam().topology), hooked.combined_x.view());
      rank.release();
    }
    buffer.check();
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
