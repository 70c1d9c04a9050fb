// Measures dispatch and combine inside one node, with what other means need for the same bytes, or between nodes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/bench/options.hpp"

namespace deep_ep::tools {

struct NormalModeOptions : BenchOptions {
  std::vector<int> sms;       ///< 0 = the library's default
  int window_mib = 0;         ///< of the buffer, 0 = the library's default
  std::vector<int> warps{0};  ///< of a block; 0 = the library's default
  std::string mode = "both";  ///< of combine: pull, push, both
  int nodes = 1;              ///< of equally many ranks; several: ranks of this host play them
  int groups = 0;             ///< nodes that a token's experts may be on, 0 = all
  bool peers = true;          ///< inside a node
  bool tune = false;          ///< several numbers of SMs
  bool uncached = true;       ///< also layout, and dispatch that exchanges counts
};

/// One line of the result.
struct Measurement {
  std::string operation{};  ///< "layout", "dispatch", "layout+notify+dispatch", "combine"
  std::string dtype{};      ///< of the rows: "fp8", "bf16", or "-"
  /// dispatch: "cached", "exchange"; combine: "pull", "push", between nodes "in heap", "copied"; or "-"
  std::string mode{};
  std::string transport{};  ///< "deep_ep", "NCCL 2.30.7", "copy engine"
  int warps = 0;            ///< of a block, 0 = the library's default
  int sms = 0;              ///< -1 = unknown
  std::int64_t tokens = 0;
  Timing timing{};
  double host = 0;            ///< seconds that a call keeps the host busy; 0 = not measured
  double logical_bytes = 0;   ///< a rank receives, own rows included (combine: sends), mean over ranks
  double wire_bytes = 0;      ///< over NVLink: between ranks of a node
  double rdma_bytes = 0;      ///< between nodes: one row for each token and other node
  double to_nodes_bytes = 0;  ///< the same with the own node, as upstream's test counts

  double logical_gb_per_s() const { return timing.median > 0 ? logical_bytes / timing.median * 1e-9 : 0; }
  double wire_gb_per_s() const { return timing.median > 0 ? wire_bytes / timing.median * 1e-9 : 0; }
  double rdma_gb_per_s() const { return timing.median > 0 ? rdma_bytes / timing.median * 1e-9 : 0; }
};

/// Collective over the processes. `report` is called for each measurement as it is made, on global rank 0's process.
/// Throws when --check finds a difference.
void run_normal_mode(const NormalModeOptions& options, const World& world, Device::Kind device,
                     const std::function<void(const Measurement&)>& report);

}  // namespace deep_ep::tools
