#include "benchmarks/low_latency.hpp"

#include <benchmark/benchmark.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "benchmarks/cluster.hpp"

namespace deep_ep::benchmarks {
namespace {

enum class Operation { dispatch_fp8, dispatch_bf16, combine, combine_logfmt, both };

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::dispatch_fp8:
      return "dispatch/fp8";
    case Operation::dispatch_bf16:
      return "dispatch/bf16";
    case Operation::combine:
      return "combine/bf16";
    case Operation::combine_logfmt:
      return "combine/logfmt";
    case Operation::both:
      return "dispatch+combine/fp8";
  }
  return "?";
}

struct Case {
  Operation operation = Operation::both;
  bool hooks = false;
  tools::WorkloadShape shape;
};

struct Sweeps {
  Device::Kind device = Device::Kind::cpu;
  tools::WorkloadShape base;
  int iterations = 0;
  std::vector<std::int64_t> tokens;
  std::vector<int> hidden;
  std::vector<int> topk;
  std::vector<int> ranks;
};

Sweeps make_sweeps(Device::Kind device, int ranks, bool full) {
  Sweeps sweeps;
  sweeps.device = device;
  sweeps.base.ranks = ranks;
  sweeps.base.tokens = 128;
  sweeps.base.experts = (288 + ranks - 1) / ranks * ranks;
  for (int fewer = 2; fewer < ranks; fewer *= 2) sweeps.ranks.push_back(fewer);
  sweeps.ranks.push_back(ranks);
  if (device == Device::Kind::cuda || full) {
    sweeps.iterations = device == Device::Kind::cuda ? 100 : 3;
    sweeps.tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512};
    sweeps.hidden = {2048, 4096, 7168, 8192};
    sweeps.topk = {1, 2, 4, 8, 16};
  } else {
    sweeps.base.tokens = 8;
    sweeps.base.hidden = 1024;
    sweeps.iterations = 3;
    sweeps.tokens = {1, 8, 32};
    sweeps.hidden = {512, 2048};
    sweeps.topk = {1, 4, 16};
  }
  return sweeps;
}

void dispatch(tools::LowLatencyBench& bench, bool fp8, bool hooks) {
  const LowLatencyDispatchResult result = bench.dispatch(fp8, hooks);
  if (hooks) result.hook();
}

void combine(tools::LowLatencyBench& bench, tools::LowLatencyCombine kind, bool hooks) {
  const LowLatencyCombineResult result = bench.combine(kind, hooks);
  if (hooks) result.hook();
}

void run_round(const Case& c, tools::LowLatencyBench& bench) {
  switch (c.operation) {
    case Operation::dispatch_fp8:
      return dispatch(bench, true, c.hooks);
    case Operation::dispatch_bf16:
      return dispatch(bench, false, c.hooks);
    case Operation::combine:
      return combine(bench, tools::LowLatencyCombine::plain, c.hooks);
    case Operation::combine_logfmt:
      return combine(bench, tools::LowLatencyCombine::logfmt, c.hooks);
    case Operation::both:
      dispatch(bench, true, c.hooks);
      return combine(bench, tools::LowLatencyCombine::plain, c.hooks);
  }
}

/// Bytes with a row for every selection, mean over ranks.
double selected_bytes(const Case& c) {
  const auto fp8 = static_cast<double>(c.shape.row_bytes_8bit());
  const auto bf16 = static_cast<double>(c.shape.row_bytes_bf16());
  const auto selections = static_cast<double>(c.shape.tokens * c.shape.topk);
  switch (c.operation) {
    case Operation::dispatch_fp8:
      return selections * fp8;
    case Operation::dispatch_bf16:
    case Operation::combine:
      return selections * bf16;
    case Operation::combine_logfmt:
      return selections * (c.shape.hidden * 10.0 / 8 + c.shape.hidden / 128 * 4.0);
    case Operation::both:
      return selections * (fp8 + bf16);
  }
  return 0;
}

void run(benchmark::State& state, const Case& c, Device::Kind device) {
  try {
    Cluster cluster(c.shape, device);
    cluster.run([&c](RankContext& context) {
      context.low_latency = std::make_unique<tools::LowLatencyBench>(c.shape, context.bootstrap, context.executor);
      context.low_latency->receive_for_combine();
    });
    const Cluster::Step step = [&c](RankContext& context) { run_round(c, *context.low_latency); };
    const int warmup = device == Device::Kind::cuda ? 20 : 1;
    for (int i = 0; i < warmup; ++i) cluster.run(step);
    for ([[maybe_unused]] auto iteration : state) state.SetIterationTime(cluster.run(step));
    state.counters["selected_bytes/s"] =
        benchmark::Counter(selected_bytes(c), benchmark::Counter::kIsIterationInvariantRate);
    state.counters["ranks"] = c.shape.ranks;
    state.counters["tokens"] = static_cast<double>(c.shape.tokens);
    state.counters["hidden"] = c.shape.hidden;
    state.counters["topk"] = c.shape.topk;
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

void add(const Sweeps& sweeps, const char* sweep, const Case& c) {
  const std::string name = std::string("low_latency_") + sweep + "/" + name_of(c.operation) +
                           (c.hooks ? "/hooks" : "") + "/ranks:" + std::to_string(c.shape.ranks) +
                           "/tokens:" + std::to_string(c.shape.tokens) + "/hidden:" + std::to_string(c.shape.hidden) +
                           "/topk:" + std::to_string(c.shape.topk);
  benchmark::RegisterBenchmark(name.c_str(),
                               [c, device = sweeps.device](benchmark::State& state) { run(state, c, device); })
      ->UseManualTime()
      ->Iterations(sweeps.iterations)
      ->Unit(benchmark::kMicrosecond);
}

/// The calls at one point.
void add_calls(const Sweeps& sweeps, const char* sweep, const tools::WorkloadShape& shape) {
  for (const Operation operation :
       {Operation::dispatch_fp8, Operation::dispatch_bf16, Operation::combine, Operation::both}) {
    for (const bool hooks : {false, true}) add(sweeps, sweep, {operation, hooks, shape});
  }
  add(sweeps, sweep, {Operation::combine_logfmt, false, shape});
}

}  // namespace

void add_low_latency(Device::Kind device, int ranks, bool full) {
  const Sweeps sweeps = make_sweeps(device, ranks, full);
  for (const std::int64_t tokens : sweeps.tokens) {
    tools::WorkloadShape shape = sweeps.base;
    shape.tokens = tokens;
    add_calls(sweeps, "tokens", shape);
  }
  for (const int hidden : sweeps.hidden) {
    tools::WorkloadShape shape = sweeps.base;
    shape.hidden = hidden;
    add_calls(sweeps, "hidden", shape);
  }
  for (const int topk : sweeps.topk) {
    tools::WorkloadShape shape = sweeps.base;
    shape.topk = topk;
    add_calls(sweeps, "topk", shape);
  }
  for (const int fewer : sweeps.ranks) {
    tools::WorkloadShape shape = sweeps.base;
    shape.ranks = fewer;
    shape.experts = sweeps.base.experts / fewer * fewer;
    add_calls(sweeps, "ranks", shape);
  }
}

}  // namespace deep_ep::benchmarks
