// `deep_ep bench low-latency`: what its two ways to measure have in common.
#pragma once

#include <memory>
#include <optional>
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

  bool who_is_late = false;  ///< instead of times: which ranks wait for which
  /// Not given: kLateRankThresholdUs, and on the CPU no verdict.
  std::optional<double> late_threshold_us;
  double late_us = 0;  ///< one rank begins each round so much later
  int late_rank = -1;  ///< which; negative: the last one

  /// The options of buffers, but for sizes.
  BufferOptions buffer(int ranks) const;
};

/// Memory that takes a GPU longer to fill than the host needs to enqueue `calls` (nothing on the CPU).
std::unique_ptr<DeviceTensor> make_filler(Executor& executor, int calls);

/// --who-is-late: a dispatch (FP8) and a combine in each round, with statistics of waits. Collective over the
/// processes.
int run_late_rank(const LowLatencyBenchOptions& options, BenchRun& run);

}  // namespace deep_ep::tools
