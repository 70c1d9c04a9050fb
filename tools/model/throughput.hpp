// What dispatch and combine between nodes should take: bytes over rates that were measured, and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deep_ep::tools {

/// Rates of a machine, in GB/s (1e9 bytes a second) for each rank and direction.
struct Machine {
  std::string name;
  double nvlink_gb_s = 0;
  std::string nvlink_source;
};

/// Of `--gpu`: h200, b200.
const std::vector<Machine>& machines();

struct ModelCase {
  int nodes = 2;
  int ranks_per_node = 8;
  std::int64_t tokens = 4096;
  std::int64_t hidden = 7168;
  int topk = 8;
  int experts = 256;
  int groups = 0;  ///< nodes that a token's experts may lie on, chosen for each token; 0: all
  double nic_gb_s = 50;
  double latency_us = 5;  ///< of one message between two NICs
};

/// What a token with `topk` different experts, each set of them as likely as any other, meets on average.
struct Spread {
  double nodes = 0;         ///< with one of its experts at least
  double remote_nodes = 0;  ///< of them, not its own
  double ranks = 0;
};
Spread spread_of(const ModelCase& shape);

enum class Operation { dispatch_fp8, dispatch_bf16, combine };
const char* name_of(Operation operation);

struct Prediction {
  double wire_bytes = 0;    ///< that a rank's NIC sends, and that it gets
  double nvlink_bytes = 0;  ///< that a rank gets over NVLink
  double floor_us = 0;      ///< wire_bytes at the NIC's rate
  double us = 0;
  double wire_gb_s = 0;  ///< wire_bytes over `us`
  /// As upstream's tests count: rows without what goes along, over RDMA also those for the own node, over NVLink also
  /// those of the own rank.
  double upstream_rdma_gb_s = 0, upstream_nvlink_gb_s = 0;
  bool nvlink_is_the_limit = false;
};
Prediction predict(const ModelCase& shape, const Machine& machine, Operation operation);

/// The part of a NIC's rate that the operation reached where the NIC was the limit.
double share_of_nic(Operation operation);

}  // namespace deep_ep::tools
