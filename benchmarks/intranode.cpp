// Google Benchmark sweeps of dispatch and combine inside one node. A time is that of the slowest rank, by the host's
// clock, from the call to the end of its kernels. README.md says how to run and read them.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/cluster.hpp"
#include "benchmarks/low_latency.hpp"

namespace deep_ep::benchmarks {
namespace {

enum class Operation { layout, cached_dispatch, dispatch, combine_pull, combine_push, nccl, copy_engine };

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::layout:
      return "layout";
    case Operation::cached_dispatch:
      return "dispatch";
    case Operation::dispatch:
      return "layout_notify_dispatch";
    case Operation::combine_pull:
      return "combine_pull";
    case Operation::combine_push:
      return "combine_push";
    case Operation::nccl:
      return "nccl";
    case Operation::copy_engine:
      return "copy_engine";
  }
  return "?";
}

struct Case {
  Operation operation = Operation::layout;
  bool as_8bit = false;
  tools::WorkloadShape shape;
  int sms = 0;

  std::int64_t row_bytes() const { return as_8bit ? shape.row_bytes_8bit() : shape.row_bytes_bf16(); }
};

/// What is varied, and around which point.
struct Sweeps {
  Device::Kind device = Device::Kind::cpu;
  tools::WorkloadShape base;
  int sms = 0;
  int iterations = 0;
  std::vector<std::int64_t> tokens;
  std::vector<int> hidden;
  std::vector<int> topk;
  std::vector<int> ranks;
  std::vector<int> sm_counts;
};

Sweeps make_sweeps(Device::Kind device, int ranks, bool full) {
  Sweeps sweeps;
  sweeps.device = device;
  sweeps.base.ranks = ranks;
  for (int fewer = 2; fewer < ranks; fewer *= 2) sweeps.ranks.push_back(fewer);
  sweeps.ranks.push_back(ranks);
  if (device == Device::Kind::cuda || full) {
    sweeps.sms = device == Device::Kind::cuda ? 24 : 0;
    sweeps.iterations = device == Device::Kind::cuda ? 50 : 3;
    sweeps.tokens = {1, 8, 32, 128, 512, 1024, 2048, 4096, 8192};
    sweeps.hidden = {2048, 4096, 7168, 8192, 16384};
    sweeps.topk = {1, 2, 4, 8, 16};
    sweeps.sm_counts = {2, 4, 6, 8, 12, 16, 20, 24, 32, 64};
  } else {
    // The CPU plays every GPU thread: small sizes show the same shape of curve.
    sweeps.base.tokens = 16;
    sweeps.base.hidden = 2048;
    sweeps.iterations = 3;
    sweeps.tokens = {1, 8, 32, 128};
    sweeps.hidden = {2048, 4096};
    sweeps.topk = {1, 4, 16};
    sweeps.sm_counts = {1, 2, 4};
  }
  // Every rank count of the sweep must share the experts out evenly.
  sweeps.base.experts = ranks * ((256 + ranks - 1) / ranks);
  return sweeps;
}

void prepare_transport(const Case& c, RankContext& context) {
  context.transport = c.operation == Operation::nccl
                          ? tools::make_nccl_transport(*context.bootstrap, *context.executor)
                          : tools::make_copy_engine_transport(*context.bootstrap, *context.executor);
  if (context.transport == nullptr) throw Error("not in this build, or not on this device");
  context.transport->prepare(context.bench.bytes_to_peers(c.row_bytes()),
                             context.bench.bytes_from_peers(c.row_bytes()));
}

/// What is done once, and what every round does.
Cluster::Step preparation(const Case& c) {
  switch (c.operation) {
    case Operation::nccl:
    case Operation::copy_engine:
      return [c](RankContext& context) { prepare_transport(c, context); };
    case Operation::combine_pull:
      return [](RankContext& context) { context.bench.receive_for_combine(CombineMode::pull); };
    case Operation::combine_push:
      return [](RankContext& context) { context.bench.receive_for_combine(CombineMode::push); };
    default:
      return [](RankContext&) {};
  }
}

Cluster::Step round(const Case& c) {
  const Config config{.num_sms = c.sms};
  switch (c.operation) {
    case Operation::layout:
      return [](RankContext& context) { context.bench.layout(); };
    case Operation::cached_dispatch:
      return [c, config](RankContext& context) {
        context.dispatched = {};
        context.dispatched = context.bench.cached_dispatch(c.as_8bit, config);
      };
    case Operation::dispatch:
      return [c, config](RankContext& context) {
        context.dispatched = {};
        context.dispatched = context.bench.dispatch(c.as_8bit, config);
      };
    case Operation::combine_pull:
      return [config](RankContext& context) { context.bench.combine(CombineMode::pull, config); };
    case Operation::combine_push:
      return [config](RankContext& context) { context.bench.combine(CombineMode::push, config); };
    case Operation::nccl:
    case Operation::copy_engine:
      return [](RankContext& context) { context.transport->enqueue(context.bench.stream()); };
  }
  return {};
}

void run(benchmark::State& state, const Case& c, Device::Kind device) {
  try {
    Cluster cluster(c.shape, device);
    cluster.run(preparation(c));
    const Cluster::Step step = round(c);
    const int warmup = device == Device::Kind::cuda ? 10 : 1;
    for (int i = 0; i < warmup; ++i) cluster.run(step);
    for ([[maybe_unused]] auto iteration : state) state.SetIterationTime(cluster.run(step));

    const auto rate = [&](std::int64_t rows) {
      const double bytes = static_cast<double>(rows) * static_cast<double>(c.row_bytes()) / c.shape.ranks;
      return benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
    };
    if (c.operation != Operation::layout) {
      state.counters["logical_bytes/s"] = rate(cluster.routes().total());
      state.counters["wire_bytes/s"] = rate(cluster.routes().total_between_ranks());
    }
    state.counters["ranks"] = c.shape.ranks;
    state.counters["tokens"] = static_cast<double>(c.shape.tokens);
    state.counters["hidden"] = c.shape.hidden;
    state.counters["topk"] = c.shape.topk;
    state.counters["sms"] = c.sms;
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

void add(const Sweeps& sweeps, std::string_view sweep, const Case& c) {
  std::string name = std::string(sweep) + "/" + name_of(c.operation);
  if (c.operation != Operation::layout) name += c.as_8bit ? "/fp8" : "/bf16";
  name += "/ranks:" + std::to_string(c.shape.ranks) + "/tokens:" + std::to_string(c.shape.tokens) +
          "/hidden:" + std::to_string(c.shape.hidden) + "/topk:" + std::to_string(c.shape.topk) +
          "/sms:" + std::to_string(c.sms);
  benchmark::RegisterBenchmark(name.c_str(),
                               [c, device = sweeps.device](benchmark::State& state) { run(state, c, device); })
      ->UseManualTime()
      ->Iterations(sweeps.iterations)
      ->Unit(benchmark::kMicrosecond);
}

/// The data-moving calls at one point.
void add_calls(const Sweeps& sweeps, std::string_view sweep, const tools::WorkloadShape& shape, int sms) {
  add(sweeps, sweep, {Operation::cached_dispatch, true, shape, sms});
  add(sweeps, sweep, {Operation::cached_dispatch, false, shape, sms});
  add(sweeps, sweep, {Operation::combine_pull, false, shape, sms});
  add(sweeps, sweep, {Operation::combine_push, false, shape, sms});
}

void add_others(const Sweeps& sweeps, std::string_view sweep, const tools::WorkloadShape& shape) {
  if (sweeps.device != Device::Kind::cuda) return;
  for (const bool as_8bit : {true, false}) {
#if DEEP_EP_HAVE_NCCL
    add(sweeps, sweep, {Operation::nccl, as_8bit, shape, 0});
#endif
    add(sweeps, sweep, {Operation::copy_engine, as_8bit, shape, 0});
  }
}

void add_all(const Sweeps& sweeps) {
  for (const std::int64_t tokens : sweeps.tokens) {
    tools::WorkloadShape shape = sweeps.base;
    shape.tokens = tokens;
    add(sweeps, "tokens", {Operation::layout, false, shape, 0});
    add_calls(sweeps, "tokens", shape, sweeps.sms);
    add(sweeps, "tokens", {Operation::dispatch, true, shape, sweeps.sms});
    add(sweeps, "tokens", {Operation::dispatch, false, shape, sweeps.sms});
    add_others(sweeps, "tokens", shape);
  }
  for (const int hidden : sweeps.hidden) {
    tools::WorkloadShape shape = sweeps.base;
    shape.hidden = hidden;
    add_calls(sweeps, "hidden", shape, sweeps.sms);
  }
  for (const int topk : sweeps.topk) {
    tools::WorkloadShape shape = sweeps.base;
    shape.topk = topk;
    add_calls(sweeps, "topk", shape, sweeps.sms);
  }
  for (const int ranks : sweeps.ranks) {
    tools::WorkloadShape shape = sweeps.base;
    shape.ranks = ranks;
    shape.experts = sweeps.base.experts / ranks * ranks;
    add_calls(sweeps, "ranks", shape, sweeps.sms);
    add_others(sweeps, "ranks", shape);
  }
  for (const int sms : sweeps.sm_counts) add_calls(sweeps, "sms", sweeps.base, sms);
}

/// Takes `--name=value` off the command line, which Google Benchmark would not know.
std::string take_option(int& argc, char** argv, std::string_view name, std::string value) {
  const std::string prefix = std::string(name) + "=";
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(prefix)) {
      value = argument.substr(prefix.size());
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  return value;
}

int main(int argc, char** argv) {
  const std::string device_word = take_option(argc, argv, "--device", "auto");
  const std::string ranks_word = take_option(argc, argv, "--ranks", "0");
  const std::string sizes = take_option(argc, argv, "--sizes", "auto");
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  int ranks = std::stoi(ranks_word);
  if (ranks <= 0) ranks = device_word != "cpu" && cuda_device_count() > 1 ? cuda_device_count() : 4;
  const Device::Kind device = tools::choose_device(device_word, ranks);
  add_all(make_sweeps(device, ranks, sizes == "full"));
  add_low_latency(device, ranks, sizes == "full");
  benchmark::AddCustomContext("device", device == Device::Kind::cuda ? "cuda" : "cpu, not a measure of speed");
  benchmark::AddCustomContext("ranks", std::to_string(ranks));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace
}  // namespace deep_ep::benchmarks

int main(int argc, char** argv) {
  try {
    return deep_ep::benchmarks::main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deep_ep_benchmarks: %s\n", error.what());
    return 1;
  }
}
