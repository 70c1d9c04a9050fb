// What is varied, and how one point is measured.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/cluster.hpp"

namespace deep_ep::benchmarks {

/// The axes that all calls share, and the point they cross at.
struct Sweeps {
  Device::Kind device = Device::Kind::cpu;
  tools::WorkloadShape base;
  int iterations = 0;
  int warmup = 0;
  std::vector<std::int64_t> tokens;
  std::vector<int> hidden;
  std::vector<int> topk;
  std::vector<int> ranks;

  /// Sizes of GPUs, which the CPU has only where `full`.
  static bool large(Device::Kind device, bool full) { return device == Device::Kind::cuda || full; }
  /// 2, 4, ... and all.
  static std::vector<int> rank_counts(int ranks);
  /// Calls visit(axis, shape) for every point, axis by axis: "tokens", "hidden", "topk", "ranks".
  void each(const std::function<void(const std::string& axis, const tools::WorkloadShape& shape)>& visit) const;
};

/// One call at one point.
struct Point {
  std::string name;  ///< of the call; the sizes are put behind it
  tools::WorkloadShape shape;
  Cluster::Step prepare;  ///< done once
  Cluster::Step round;    ///< what is timed
  /// Counters beside those of the shape.
  std::function<void(benchmark::State& state, const Cluster& cluster)> count;
};

/// "/ranks:8/tokens:4096/hidden:7168/topk:8"
std::string sizes(const tools::WorkloadShape& shape);

void add(const Sweeps& sweeps, const Point& point);

}  // namespace deep_ep::benchmarks
