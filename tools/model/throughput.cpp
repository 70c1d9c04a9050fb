#include "tools/model/throughput.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/common/limits.hpp"
#include "kernels/internode/dispatch_shared.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kScaleChannels = 128;  // that share a scale of 8-bit rows

/// The chance that `drawn` different experts of `all` include one of `some`: 1 - C(all - some, drawn) / C(all, drawn).
double chance_to_meet(int some, int all, int drawn) {
  double none = 1;
  for (int i = 0; i < drawn; ++i) none *= std::max(0.0, static_cast<double>(all - some - i) / (all - i));
  return 1 - none;
}

/// Bytes of a token's row without, and with all that travels with it between nodes.
struct RowBytes {
  double payload, sent;
};

RowBytes row_bytes(const ModelCase& shape, Operation operation) {
  const bool wide = operation != Operation::dispatch_fp8;
  const RowShape row{.row_bytes = static_cast<std::uint32_t>(wide ? 2 * shape.hidden : shape.hidden),
                     .num_scales = wide ? 0 : static_cast<int>((shape.hidden + kScaleChannels - 1) / kScaleChannels),
                     .num_topk = shape.topk,
                     .topk_idx_is_64_bit = true};
  // Combine sends back the sum of a node's rows and of their weights.
  const std::size_t packed = operation == Operation::combine
                                 ? row.row_bytes + static_cast<std::size_t>(row.num_topk) * 4
                                 : PackedRow::bytes(row, shape.ranks_per_node);
  return {static_cast<double>(row.row_bytes), static_cast<double>(align_to_line(packed))};
}

}  // namespace

const std::vector<Machine>& machines() {
  // H200: BF16 dispatch of docs/measurements/2026-11-21-intranode-8xh200.md: 4096 tokens, 4.633 rows of 14336 bytes
  // each to other ranks, in 817 us. B200: not measured here; four published kernels end between 635 and 670.
  static const std::vector<Machine> all{{"h200", 333, "measured on 8 GPUs"},
                                        {"b200", 635, "published, not measured here"}};
  return all;
}

double share_of_nic(Operation operation) {
  // docs/measurements/2026-11-22-2xh200.md, wire `simulated` at 25 GB/s.
  switch (operation) {
    case Operation::dispatch_fp8:
      return 0.93;
    case Operation::dispatch_bf16:
      return 0.956;
    case Operation::combine:
      return 0.968;
  }
  return 0;
}

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::dispatch_fp8:
      return "dispatch fp8";
    case Operation::dispatch_bf16:
      return "dispatch bf16";
    case Operation::combine:
      return "combine";
  }
  return "";
}

Spread spread_of(const ModelCase& shape) {
  const int groups = shape.groups == 0 ? shape.nodes : std::min(shape.groups, shape.nodes);
  const int per_node = shape.experts / shape.nodes;
  const int per_rank = per_node / shape.ranks_per_node;
  const int candidates = groups * per_node;
  Spread spread;
  spread.nodes = groups * chance_to_meet(per_node, candidates, shape.topk);
  spread.remote_nodes = spread.nodes * (shape.nodes - 1) / shape.nodes;
  spread.ranks = groups * shape.ranks_per_node * chance_to_meet(per_rank, candidates, shape.topk);
  return spread;
}

Prediction predict(const ModelCase& shape, const Machine& machine, Operation operation) {
  constexpr double kGiga = 1e9;
  constexpr double kMicro = 1e-6;
  const Spread spread = spread_of(shape);
  const RowBytes row = row_bytes(shape, operation);
  const auto tokens = static_cast<double>(shape.tokens);
  const int width = shape.ranks_per_node;

  Prediction result;
  result.wire_bytes = tokens * spread.remote_nodes * row.sent;
  // A rank's rows come from the ranks of its node, relays included; one of them is the rank itself.
  result.nvlink_bytes = tokens * spread.ranks * (width - 1) / width * row.payload;
  result.floor_us = result.wire_bytes / (shape.nic_gb_s * kGiga) / kMicro;
  const double wire_us = result.floor_us / share_of_nic(operation);
  const double nvlink_us = result.nvlink_bytes / (machine.nvlink_gb_s * kGiga) / kMicro;
  result.nvlink_is_the_limit = nvlink_us > wire_us;
  // The slower of both from end to end, as a row goes through both, and one message until the first row is there.
  result.us = std::max(wire_us, nvlink_us) + (shape.nodes > 1 ? shape.latency_us : 0);
  const double seconds = result.us * kMicro;
  result.wire_gb_s = result.wire_bytes / seconds / kGiga;
  result.upstream_rdma_gb_s = tokens * spread.nodes * row.payload / seconds / kGiga;
  result.upstream_nvlink_gb_s = tokens * spread.ranks * row.payload / seconds / kGiga;
  return result;
}

}  // namespace deep_ep::tools
