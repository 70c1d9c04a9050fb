// `deep_ep bench low-latency`: its options.
#pragma once

#include <memory>
#include <string>

#include "tools/bench/benchmark.hpp"
#include "tools/bench/low_latency_rank.hpp"

namespace deep_ep::tools {

struct LowLatencyBenchOptions : BenchOptions {
  LowLatencyBenchOptions() { nodes = 0; }

  bool nvlink = true;          ///< false: all ranks reach each other by RDMA
  bool masking = false;        ///< buffers with LowLatencyOptions::masking
  std::string rails = "auto";  ///< rows between nodes by rails: auto, always, never
  bool graphs = true;          ///< also replays of CUDA graphs, where there are any
  bool arrivals = false;       ///< dispatches are given arrival counters

  /// The options of buffers, but for sizes.
  BufferOptions buffer(int ranks) const;
};

/// Memory that takes a GPU longer to fill than the host needs to enqueue `calls` (nothing on the CPU).
std::unique_ptr<DeviceTensor> make_filler(Executor& executor, int calls);

}  // namespace deep_ep::tools
