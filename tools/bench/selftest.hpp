// The cases of `deep_ep bench selftest` in normal mode.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/normal_mode_rank.hpp"

namespace deep_ep::tools {

/// DeepEP's matrix: {BF16 twice, FP8; between nodes FP8 twice} x top-k x async x previous. The second of two has
/// outputs of a fixed size.
std::vector<NormalModeCall> selftest_cases(int nodes);

/// As DeepEP's tests say it: "Running with BF16, with top-k (async=False, previous=False)".
std::string name_of(const NormalModeCall& call);

/// Collective. Dispatch, dispatch along the same routes, and combine. @throws Error at the first difference from what
/// the oracle says.
void run_selftest_case(NormalModeRank& rank, const NormalModeCall& one);

}  // namespace deep_ep::tools
