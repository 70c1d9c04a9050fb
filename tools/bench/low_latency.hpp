// Measures the low-latency dispatch and combine.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/low_latency_rank.hpp"
#include "tools/bench/options.hpp"

namespace deep_ep::tools {

struct LowLatencyOptions : BenchOptions {
  int nodes = 0;               ///< that the ranks play, of equal size; 0: those that they are on
  bool nvlink = true;          ///< false: all ranks reach each other by RDMA
  std::string rails = "auto";  ///< rows between nodes by rails: auto, always, never
  bool hooks = true;           ///< also send and receive parts by themselves
  bool graphs = true;          ///< also replays of CUDA graphs, where there are any
  bool who_is_late = false;    ///< instead of times: who waits for whom
  /// Not given: kLateRankThresholdUs, and on the CPU no verdict.
  std::optional<double> late_threshold_us;
  double late_us = 0;        ///< so much later one rank begins each round; or, where times are measured, each send part
  int late_rank = -1;        ///< which; negative: the last one
  bool trace = false;        ///< who waits for whom, with each call in two parts
  bool arrivals = false;     ///< dispatches are given arrival counters
  bool combine_fp8 = false;  ///< also combine with rows in FP8
};

/// The buffer and inputs of a rank, as the options have them; and memory that takes a GPU longer to fill than the host
/// needs to enqueue `calls` (nothing on the CPU).
LowLatencyReach reach_of(const LowLatencyOptions& options, int ranks);
std::unique_ptr<DeviceTensor> make_filler(Executor& executor, int calls);

/// Collective over the processes. `setting`: what all figures have in common. Throws when --check finds a difference.
/// Operations are "dispatch", "combine" and "dispatch+combine"; parts "whole", "send", "receive", "send late", "receive
/// late" and "graph"; modes of combine "plain", "zero copy" and "FP8". Rates are those of the time back to
/// back or, if there is none, of aligned rounds.
void run_low_latency(const LowLatencyOptions& options, const World& world, Device::Kind device, const Figure& setting,
                     const FigureReport& report);

}  // namespace deep_ep::tools
