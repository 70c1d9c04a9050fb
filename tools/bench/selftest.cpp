#include "tools/bench/selftest.hpp"

#include <fmt/format.h>

namespace deep_ep::tools {

std::vector<NormalModeCall> selftest_cases(int nodes) {
  std::vector<NormalModeCall> cases;
  for (const bool previous : {false, true}) {
    for (const bool async : {false, true}) {
      for (const bool fp8 : {false, true}) {
        for (const bool worst : {false, true}) {
          for (const bool topk : {false, true}) {
            if (fp8 && worst && nodes == 1) continue;
            cases.push_back({.fp8 = fp8, .topk = topk, .worst = worst, .async = async, .previous = previous});
          }
        }
      }
    }
  }
  return cases;
}

std::string name_of(const NormalModeCall& call) {
  const auto word = [](bool value) { return value ? "True" : "False"; };
  return fmt::format("Running with {}, {} top-k (async={}, previous={})", call.fp8 ? "FP8" : "BF16",
                     call.topk ? "with" : "without", word(call.async), word(call.previous));
}

void run_selftest_case(NormalModeRank& rank, const NormalModeCall& one) {
  const DispatchResult received = rank.dispatch(one);
  rank.check_dispatched(received, one);
  rank.check_dispatched(rank.dispatch_again(received.handle, one), one);
  // Experts that change nothing: their output is what BF16 rows would be.
  NormalModeCall wide = one;
  wide.fp8 = false;
  const CachedDispatchResult rows = one.fp8 ? rank.dispatch_again(received.handle, wide) : rows_of(received);
  CombineArguments arguments{.x = rows.recv_x.view(), .handle = &received.handle};
  if (one.topk) arguments.topk_weights = received.recv_topk_weights->view();
  rank.check_combined(rank.combine(arguments, one));
  rank.buffer().check();
}

}  // namespace deep_ep::tools
