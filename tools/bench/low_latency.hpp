// Measures the low-latency dispatch and combine.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

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
  std::string trace;         ///< an SVG file to write
  bool arrivals = false;     ///< dispatches are given arrival counters
  bool combine_fp8 = false;  ///< also combine with rows in FP8
};

/// One line of the result.
struct LowLatencyMeasurement {
  std::string operation{};  ///< "dispatch", "combine", "dispatch+combine"
  std::string variant{};    ///< dispatch: "fp8", "bf16", "fp8-token", "nvfp4"; combine: "plain", "zero copy",
                            ///< "FP8"; both: "fp8"
  std::string part{};       ///< "whole", "send", "receive", "send late", "receive late", "graph"
  std::int64_t tokens = 0;
  Timing timing{};
  double host = 0;            ///< seconds that a call keeps the host busy; 0 = not measured
  double selected_bytes = 0;  ///< a row for every selection, as upstream's test counts, mean over ranks
  double wire_bytes = 0;      ///< rows that cross between ranks, one for each token and rank, mean over ranks

  /// Over the time back to back or, if there is none, of aligned rounds.
  double seconds() const { return timing.back_to_back > 0 ? timing.back_to_back : timing.median; }
  double selected_gb_per_s() const { return seconds() > 0 ? selected_bytes / seconds() * 1e-9 : 0; }
  double wire_gb_per_s() const { return seconds() > 0 ? wire_bytes / seconds() * 1e-9 : 0; }
};

/// Collective over the processes. `report` is called for each measurement as it is made, on global rank 0's process.
/// Throws when --check finds a difference.
void run_low_latency(const LowLatencyOptions& options, const World& world, Device::Kind device,
                     const std::function<void(const LowLatencyMeasurement&)>& report);

}  // namespace deep_ep::tools
