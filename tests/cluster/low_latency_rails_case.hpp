// Low-latency calls between nodes of several ranks, by rails and directly: see LowLatencyRails.
#pragma once

#include <vector>

#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {

/// Equal nodes of consecutive ranks.
struct Nodes {
  int ranks;
  int ranks_per_node;
  int node_of(int rank) const { return rank / ranks_per_node; }
};

using Combined = std::vector<oracle::Combined>;

/// Enough memory for cases of at most so many tokens and channels.
BufferOptions rail_options(const Nodes& nodes, std::int64_t max_tokens, std::int64_t hidden, double timeout_s = 0);

/// Two combines that receive at once; both must be `expected`.
void combine_twice(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one, const Combined& expected,
                   const LowLatencyHandle& handle, int num_sms = 0);

/// A dispatch and two combines of each case after the other on one buffer; `sms` in turn. Where nodes have rails
/// (of 0 ranks: none), a third one with a hook, which goes directly.
void run_combines(const ClusterOptions& cluster, const Nodes& nodes, const std::vector<LowLatencyCombineCase>& cases,
                  const std::vector<int>& sms = {0});

}  // namespace deep_ep::test
