// Counts of tokens for more ranks than a thread keeps as bits, against plain loops.
#include <set>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "kernels/normal/layout.hpp"
#include "oracle/random.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using Words = std::vector<std::int32_t>;

/// Nodes that divide the bits, that do not, and that are wider.
constexpr int kNodesAndWidth[][2] = {{128, 8}, {14, 72}, {3, 200}, {2, 128}, {1, 129}};

TEST(Layout, CountsForAThousandRanks) {
  constexpr int kTokens = 70, kTopk = 32, kExpertsOfRank = 2;
  for (const auto& executor : executors_present(4)) {
    executor->make_current();
    for (const auto& [nodes, width] : kNodesAndWidth) {
      const int ranks = nodes * width, experts = ranks * kExpertsOfRank;
      SCOPED_TRACE(std::to_string(nodes) + " nodes of " + std::to_string(width));
      oracle::Random random(7);
      std::vector<std::int64_t> selections;
      Words of_rank(static_cast<std::size_t>(ranks)), of_expert(static_cast<std::size_t>(experts)),
          of_node(static_cast<std::size_t>(nodes));
      std::vector<std::uint8_t> members(static_cast<std::size_t>(kTokens * ranks));
      for (int token = 0; token < kTokens; ++token) {
        std::set<std::int64_t> to_ranks, to_nodes;
        for (int k = 0; k < kTopk; ++k) {
          const std::int64_t expert = token % 7 == 0 ? random.below(9) - 4 : random.below(experts);
          selections.push_back(expert);
          if (expert < 0) continue;
          ++of_expert[std::size_t(expert)];
          to_ranks.insert(expert / kExpertsOfRank);
          to_nodes.insert(expert / kExpertsOfRank / width);
        }
        for (const auto rank : to_ranks) {
          ++of_rank[std::size_t(rank)];
          members[std::size_t(token * ranks + rank)] = 1;
        }
        for (const auto node : to_nodes) ++of_node[std::size_t(node)];
      }
      const Shared<std::int64_t> topk_idx(*executor, selections);
      const Shared<std::int32_t> ranks_out(*executor, Words(of_rank.size(), -1)),
          experts_out(*executor, Words(of_expert.size(), -1)), nodes_out(*executor, Words(of_node.size(), -1)),
          work(*executor, 1 + of_rank.size() + of_expert.size() + of_node.size());
      const Shared<std::uint8_t> in_rank(*executor, std::vector<std::uint8_t>(members.size(), 9));
      const LayoutParams params{.topk_idx = {topk_idx.data(), true},
                                .num_tokens = kTokens,
                                .num_topk = kTopk,
                                .num_experts = experts,
                                .num_ranks = ranks,
                                .ranks_per_node = width,
                                .num_nodes = nodes,
                                .columns = ranks + nodes,
                                .work = reinterpret_cast<LayoutWork*>(work.data()),
                                .num_tokens_per_rank = ranks_out.data(),
                                .num_tokens_per_expert = experts_out.data(),
                                .num_tokens_per_node = nodes_out.data(),
                                .is_token_in_rank = in_rank.data()};
      const std::size_t shared_bytes = static_cast<std::size_t>(params.counters()) * sizeof(std::int32_t);
      dynamic_cast<Backend&>(*executor).kernels().layout(params, {2, 64, shared_bytes}, nullptr);
      executor->synchronize(nullptr);
      EXPECT_EQ(ranks_out.read(), of_rank);
      EXPECT_EQ(experts_out.read(), of_expert);
      EXPECT_EQ(nodes_out.read(), of_node);
      EXPECT_EQ(in_rank.read(), members);
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
