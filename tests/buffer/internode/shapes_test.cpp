// What the random rounds between nodes are made of: is everything drawn that a call may meet there?
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>

#include "tests/cluster/case.hpp"

namespace deep_ep::test {
namespace {

/// The features of one shape, read off the tokens and their experts, not off the names of what made them.
std::set<std::string> features_of(const Shape& shape) {
  const Case one = make_case(shape);
  std::set<std::string> features;
  const int nodes = shape.nodes();
  const int width = shape.ranks_per_node;
  std::vector<std::int64_t> tokens_of_node(static_cast<std::size_t>(nodes));
  std::set<std::int64_t> ranks;
  std::set<std::int64_t> reached;
  std::int64_t tokens = 0;
  std::size_t most_nodes = 0;  // of one token
  bool crosses = false;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    tokens += shape.tokens[r];
    tokens_of_node[static_cast<std::size_t>(rank / width)] += shape.tokens[r];
    if (shape.tokens[r] == 0) features.insert("a rank without tokens");
    const auto& idx = one.selections[r].idx;
    for (std::int64_t t = 0; t < shape.tokens[r]; ++t) {
      std::set<std::int64_t> experts;
      std::set<std::int64_t> nodes_of_token;
      for (int k = 0; k < shape.topk; ++k) {
        const std::int64_t expert = idx[static_cast<std::size_t>(t * shape.topk + k)];
        if (expert == -1) features.insert("-1");
        if (expert < -1) features.insert("below -1");
        if (expert < 0) continue;
        if (!experts.insert(expert).second) features.insert("an expert twice in one token");
        ranks.insert(expert / shape.local_experts);
        nodes_of_token.insert(expert / shape.local_experts / width);
      }
      crosses = crosses || std::any_of(nodes_of_token.begin(), nodes_of_token.end(),
                                       [&](std::int64_t node) { return node != rank / width; });
      most_nodes = std::max(most_nodes, nodes_of_token.size());
      reached.insert(nodes_of_token.begin(), nodes_of_token.end());
    }
  }
  if (tokens == 0) features.insert("no tokens at all");
  if (tokens == 0) return features;
  if (std::count(tokens_of_node.begin(), tokens_of_node.end(), 0) != 0) features.insert("a node without tokens");
  if (ranks.empty()) features.insert("no row at all");
  if (ranks.size() == 1) features.insert("all tokens to one rank");
  if (ranks.size() > 1 && reached.size() == 1) features.insert("all tokens to one node, several ranks");
  const auto count = static_cast<std::size_t>(nodes);
  if (tokens >= 8 && shape.topk >= 4 && reached.size() == count && most_nodes <= (count + 1) / 2) {
    features.insert("all nodes, but a token only half of them");
  }
  if (most_nodes == count) features.insert("a token to all nodes");
  if (crosses) features.insert("rows between nodes");
  if (!shape.with_topk) features.insert("layout only");
  return features;
}

TEST(InternodeShapesTest, AnExhaustiveMixIsDrawn) {
  constexpr int kShapes = 150;
  for (const auto& [nodes, width] : {std::pair{2, 8}, {3, 3}}) {
    oracle::Random random(7);
    std::map<std::string, int> seen;
    for (int i = 0; i < kShapes; ++i) {
      for (const std::string& feature : features_of(random_shape_of_nodes(random, nodes, width))) ++seen[feature];
    }
    for (const char* const feature :
         {"a rank without tokens", "a node without tokens", "no tokens at all", "no row at all",
          "all tokens to one rank", "all tokens to one node, several ranks", "all nodes, but a token only half of them",
          "a token to all nodes", "-1", "below -1", "an expert twice in one token", "rows between nodes",
          "layout only"}) {
      EXPECT_GE(seen[feature], 3) << feature << ", " << nodes << " nodes of " << width;
      std::printf("%d x %d: %3d of %d: %s\n", nodes, width, seen[feature], kShapes, feature);
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
