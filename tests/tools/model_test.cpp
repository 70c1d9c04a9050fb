// `deep_ep model`: what it counts, against counting by hand and by drawing.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tools/model/throughput.hpp"

namespace deep_ep::tools {
namespace {

const Machine kMachine{"test", 400, ""};

// Tokens that choose `groups` nodes, then experts on them, as the model has it.
Spread drawn(const ModelCase& shape, int rounds) {
  std::mt19937 random(7);
  const int per_node = shape.experts / shape.nodes;
  const int per_rank = per_node / shape.ranks_per_node;
  Spread sum;
  for (int round = 0; round < rounds; ++round) {
    std::vector<int> nodes(static_cast<std::size_t>(shape.nodes));
    std::iota(nodes.begin(), nodes.end(), 0);
    std::shuffle(nodes.begin(), nodes.end(), random);
    nodes.resize(static_cast<std::size_t>(shape.groups == 0 ? shape.nodes : shape.groups));
    std::vector<int> experts;
    for (const int node : nodes) {
      for (int i = 0; i < per_node; ++i) experts.push_back(node * per_node + i);
    }
    std::shuffle(experts.begin(), experts.end(), random);
    std::set<int> met_nodes, met_ranks;
    for (int i = 0; i < shape.topk; ++i) {
      met_nodes.insert(experts[static_cast<std::size_t>(i)] / per_node);
      met_ranks.insert(experts[static_cast<std::size_t>(i)] / per_rank);
    }
    const int own = round % shape.nodes;
    sum.nodes += static_cast<double>(met_nodes.size());
    sum.remote_nodes += static_cast<double>(met_nodes.size() - met_nodes.count(own));
    sum.ranks += static_cast<double>(met_ranks.size());
  }
  return {sum.nodes / rounds, sum.remote_nodes / rounds, sum.ranks / rounds};
}

TEST(ModelTest, SpreadIsWhatDrawingGives) {
  for (const ModelCase& shape : {ModelCase{}, ModelCase{.nodes = 4}, ModelCase{.nodes = 8, .groups = 4},
                                 ModelCase{.nodes = 3, .ranks_per_node = 2, .topk = 5, .experts = 24}}) {
    const Spread made = spread_of(shape);
    const Spread seen = drawn(shape, 20000);
    EXPECT_NEAR(made.nodes, seen.nodes, 0.02) << shape.nodes;
    EXPECT_NEAR(made.remote_nodes, seen.remote_nodes, 0.03) << shape.nodes;
    EXPECT_NEAR(made.ranks, seen.ranks, 0.04) << shape.nodes;
  }
}

TEST(ModelTest, BytesByHand) {
  // Every token has an expert on both nodes: as many experts as there are.
  const ModelCase shape{.nodes = 2, .ranks_per_node = 1, .tokens = 100, .hidden = 128, .topk = 4, .experts = 4};
  // 256 bytes; 4 selections, 4 weights, the source index, 1 place, 4 bytes each: 296, in whole lines 384.
  EXPECT_DOUBLE_EQ(predict(shape, kMachine, Operation::dispatch_bf16).wire_bytes, 100 * 384);
  // 128 bytes, a scale, and the same.
  EXPECT_DOUBLE_EQ(predict(shape, kMachine, Operation::dispatch_fp8).wire_bytes, 100 * 256);
  // 256 bytes and 4 weights.
  EXPECT_DOUBLE_EQ(predict(shape, kMachine, Operation::combine).wire_bytes, 100 * 384);
  EXPECT_DOUBLE_EQ(predict(shape, kMachine, Operation::combine).nvlink_bytes, 0);
}

TEST(ModelTest, TheSlowerWireDecides) {
  ModelCase shape{.nodes = 2};
  EXPECT_FALSE(predict(shape, kMachine, Operation::dispatch_bf16).nvlink_is_the_limit);
  const double slow = predict(shape, kMachine, Operation::dispatch_bf16).us;
  shape.nic_gb_s = 500;
  const Prediction fast = predict(shape, kMachine, Operation::dispatch_bf16);
  EXPECT_TRUE(fast.nvlink_is_the_limit);
  EXPECT_LT(fast.us, slow);
  EXPECT_DOUBLE_EQ(fast.us, fast.nvlink_bytes / 400e9 * 1e6 + shape.latency_us);
}

TEST(ModelTest, UpstreamCountsRowsThatStay) {
  const ModelCase shape{.nodes = 2, .latency_us = 0};
  const Prediction made = predict(shape, kMachine, Operation::dispatch_bf16);
  const Spread spread = spread_of(shape);
  EXPECT_NEAR(made.wire_gb_s, share_of_nic(Operation::dispatch_bf16) * 50, 1e-9);
  const double without_sidecar = made.upstream_rdma_gb_s * spread.remote_nodes / spread.nodes;
  EXPECT_LT(without_sidecar, made.wire_gb_s);
  EXPECT_GT(without_sidecar, 0.98 * made.wire_gb_s);
}

TEST(ModelTest, OneNodeNeedsNoNic) {
  const Prediction made = predict({.nodes = 1, .latency_us = 5}, kMachine, Operation::combine);
  EXPECT_DOUBLE_EQ(made.wire_bytes, 0);
  EXPECT_DOUBLE_EQ(made.us, made.nvlink_bytes / 400e9 * 1e6);
}

}  // namespace
}  // namespace deep_ep::tools
