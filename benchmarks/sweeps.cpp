#include "benchmarks/sweeps.hpp"

#include <exception>

namespace deep_ep::benchmarks {
namespace {

void run(benchmark::State& state, const Point& point, Device::Kind device, int warmup) {
  try {
    Cluster cluster(point.shape, device);
    if (point.prepare) cluster.run(point.prepare);
    for (int i = 0; i < warmup; ++i) cluster.run(point.round);
    for ([[maybe_unused]] auto iteration : state) state.SetIterationTime(cluster.run(point.round));
    point.count(state, cluster);
    state.counters["ranks"] = point.shape.ranks;
    state.counters["tokens"] = static_cast<double>(point.shape.tokens);
    state.counters["hidden"] = point.shape.hidden;
    state.counters["topk"] = point.shape.topk;
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

}  // namespace

std::vector<int> Sweeps::rank_counts(int ranks) {
  std::vector<int> counts;
  for (int fewer = 2; fewer < ranks; fewer *= 2) counts.push_back(fewer);
  counts.push_back(ranks);
  return counts;
}

void Sweeps::each(const std::function<void(const std::string& axis, const tools::WorkloadShape& shape)>& visit) const {
  tools::WorkloadShape shape = base;
  for (const std::int64_t count : tokens) {
    shape.tokens = count;
    visit("tokens", shape);
  }
  shape = base;
  for (const int channels : hidden) {
    shape.hidden = channels;
    visit("hidden", shape);
  }
  shape = base;
  for (const int experts : topk) {
    shape.topk = experts;
    visit("topk", shape);
  }
  shape = base;
  for (const int count : ranks) {
    shape.ranks = count;
    shape.experts = base.experts / count * count;
    visit("ranks", shape);
  }
}

std::string sizes(const tools::WorkloadShape& shape) {
  return "/ranks:" + std::to_string(shape.ranks) + "/tokens:" + std::to_string(shape.tokens) +
         "/hidden:" + std::to_string(shape.hidden) + "/topk:" + std::to_string(shape.topk);
}

void add(const Sweeps& sweeps, const Point& point) {
  const auto measure = [point, device = sweeps.device, warmup = sweeps.warmup](benchmark::State& state) {
    run(state, point, device, warmup);
  };
  benchmark::RegisterBenchmark(point.name.c_str(), measure)
      ->UseManualTime()
      ->Iterations(sweeps.iterations)
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace deep_ep::benchmarks
