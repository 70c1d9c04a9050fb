// Low-latency combine with rows in FP8 against the oracle, to the bit and within the error that is documented.
#include <cmath>
#include <limits>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyCombineFp8Test : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyCombineFp8Test);

LowLatencyCombineCase fp8_case(const LowLatencyCaseShape& shape, std::int64_t hidden) {
  LowLatencyCombineCase one = make_low_latency_combine_case(shape, hidden);
  one.options.fp8 = true;
  return one;
}

/// Whole and with a hook.
template <class Check>
void combine_both_ways(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one, Topology topology,
                       const Check& check) {
  const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
  const LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
  const LowLatencyCombineResult whole = buffer.low_latency_combine(arguments, rank.call());
  check(one.expected(), whole.combined_x.view());
  const LowLatencyCombineResult hooked = buffer.low_latency_combine(with_hook(arguments), rank.call());
  hooked.hook();
  check(one.expected_with_hooks(topology), hooked.combined_x.view());
}

/// Rows of less than a pass, of whole passes, and of several with a rest.
TEST_P(LowLatencyCombineFp8Test, EveryWidth) {
  DEEP_EP_NEEDS_RANKS(2);
  std::vector<LowLatencyCombineCase> cases;
  for (const std::int64_t hidden : ends_of<std::int64_t>({128, 384, 896, 1024, 2560, 7168})) {
    cases.push_back(fp8_case({.tokens = {3, 5},
                              .max_tokens = 20,
                              .hidden = 128,
                              .topk = 4,
                              .routing = oracle::Routing::duplicates,
                              .seed = cases.size() + 1},
                             hidden));
  }
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 20, 7168));
    for (const LowLatencyCombineCase& one : cases) {
      combine_both_ways(rank, buffer, one, GetParam().topology, [&](const auto& expected, const TensorView& seen) {
        check_low_latency_combine(rank, one, expected, seen);
      });
      rank.release();
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Groups of 128 channels decide alone: zeros stay zeros, tiny and huge ones are what the oracle says, and where one is
/// NaN or infinite, all of the group become NaN, but none of another.
TEST_P(LowLatencyCombineFp8Test, GroupsOutOfTheOrdinary) {
  DEEP_EP_NEEDS_RANKS(2);
  constexpr std::size_t kHidden = 1024;  // a whole pass and one group
  LowLatencyCombineCase one =
      fp8_case({.tokens = {2, 2}, .max_tokens = 2, .hidden = 128, .topk = 2, .seed = 4}, kHidden);
  for (auto& input : one.inputs) {
    for (float& weight : input.selection.weights) weight = 1.0f;
    for (std::size_t row = 0; row < input.x.size() / kHidden; ++row) {
      const auto group = [&](std::size_t number, auto value_of) {
        for (std::size_t i = 0; i < 128; ++i) {
          input.x[row * kHidden + number * 128 + i] =
              oracle::bf16_bits(static_cast<float>(value_of(static_cast<int>(i))));
        }
      };
      const auto with_one = [&](std::size_t number, float odd) {
        group(number, [&](int i) { return i == 77 ? odd : 1.0f; });
      };
      group(0, [](int) { return 0.0f; });
      group(1, [](int i) { return std::ldexp(1.0, -i); });
      group(2, [](int i) { return -std::ldexp(1.0, -140 + i); });
      with_one(4, std::numeric_limits<float>::quiet_NaN());
      with_one(5, -std::numeric_limits<float>::infinity());
      with_one(7, 1e38f);
    }
  }
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 2, kHidden));
    combine_both_ways(rank, buffer, one, GetParam().topology, [&](const auto& expected, const TensorView& combined) {
      const auto seen = rank.download<std::uint16_t>(combined);
      require_same(expected[index(rank.rank())].x, seen, "groups out of the ordinary", kHidden);
      for (std::size_t i = 0; i < seen.size(); ++i) {
        const std::size_t group = i % kHidden / 128;
        const bool is_nan = std::isnan(oracle::bf16_value(seen[i]));
        require(is_nan == (group == 4 || group == 5), "channel " + std::to_string(i) + ": is it NaN?");
        require(group != 0 || seen[i] == 0, "zeros stay zeros");
      }
    });
    buffer.check();
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
