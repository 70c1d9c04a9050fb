// Google Benchmark sweeps of dispatch and combine inside one node. A time is that of the slowest rank, by the host's
// clock, from the call to the end of its kernels. README.md says how to run and read them.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/low_latency.hpp"
#include "benchmarks/sweeps.hpp"

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

struct Call {
  Operation operation = Operation::layout;
  bool as_8bit = false;
  int sms = 0;

  std::int64_t row_bytes(const tools::WorkloadShape& shape) const {
    return as_8bit ? shape.row_bytes_8bit() : shape.row_bytes_bf16();
  }
};

struct IntranodeSweeps : Sweeps {
  int sms = 0;
  std::vector<int> sm_counts;
};

IntranodeSweeps make_sweeps(Device::Kind device, int ranks, bool full) {
  IntranodeSweeps sweeps;
  sweeps.device = device;
  sweeps.warmup = device == Device::Kind::cuda ? 10 : 1;
  sweeps.iterations = device == Device::Kind::cuda ? 50 : 3;
  sweeps.sms = device == Device::Kind::cuda ? 24 : 0;
  sweeps.ranks = Sweeps::rank_counts(ranks);
  sweeps.base.ranks = ranks;
  // Every rank count of the sweep must share the experts out evenly.
  sweeps.base.experts = ranks * ((256 + ranks - 1) / ranks);
  if (Sweeps::large(device, full)) {
    sweeps.tokens = {1, 8, 32, 128, 512, 1024, 2048, 4096, 8192};
    sweeps.hidden = {2048, 4096, 7168, 8192, 16384};
    sweeps.topk = {1, 2, 4, 8, 16};
    sweeps.sm_counts = {2, 4, 6, 8, 12, 16, 20, 24, 32, 64};
  } else {
    // The CPU plays every GPU thread: small sizes show the same shape of curve.
    sweeps.base.tokens = 16;
    sweeps.base.hidden = 2048;
    sweeps.tokens = {1, 8, 32, 128};
    sweeps.hidden = {2048, 4096};
    sweeps.topk = {1, 4, 16};
    sweeps.sm_counts = {1, 2, 4};
  }
  return sweeps;
}

void prepare_transport(Operation operation, std::int64_t row_bytes, RankContext& context) {
  context.transport = operation == Operation::nccl
                          ? tools::make_nccl_transport(*context.bootstrap, *context.executor)
                          : tools::make_copy_engine_transport(*context.bootstrap, *context.executor);
  if (context.transport == nullptr) throw Error("not in this build, or not on this device");
  context.transport->prepare(context.bench.bytes_to_peers(row_bytes), context.bench.bytes_from_peers(row_bytes));
}

/// What is done once.
Cluster::Step preparation(const Call& call, std::int64_t row_bytes) {
  switch (call.operation) {
    case Operation::nccl:
    case Operation::copy_engine:
      return [call, row_bytes](RankContext& context) { prepare_transport(call.operation, row_bytes, context); };
    case Operation::combine_pull:
      return [](RankContext& context) { context.bench.receive_for_combine(CombineMode::pull); };
    case Operation::combine_push:
      return [](RankContext& context) { context.bench.receive_for_combine(CombineMode::push); };
    default:
      return {};
  }
}

/// What every round does.
Cluster::Step round(const Call& call) {
  const Config config{.num_sms = call.sms};
  switch (call.operation) {
    case Operation::layout:
      return [](RankContext& context) { context.bench.layout(); };
    case Operation::cached_dispatch:
      return [call, config](RankContext& context) {
        context.dispatched = {};
        context.dispatched = context.bench.cached_dispatch(call.as_8bit, config);
      };
    case Operation::dispatch:
      return [call, config](RankContext& context) {
        context.dispatched = {};
        context.dispatched = tools::rows_of(context.bench.dispatch(call.as_8bit, config));
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

void add_call(const Sweeps& sweeps, const std::string& axis, const tools::WorkloadShape& shape, const Call& call) {
  std::string name = axis + "/" + name_of(call.operation);
  if (call.operation != Operation::layout) name += call.as_8bit ? "/fp8" : "/bf16";
  const std::int64_t row_bytes = call.row_bytes(shape);
  const auto count = [call, row_bytes](benchmark::State& state, const Cluster& cluster) {
    const auto rate = [&](std::int64_t rows) {
      const double bytes = static_cast<double>(rows) * static_cast<double>(row_bytes) / cluster.shape().ranks;
      return benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
    };
    if (call.operation != Operation::layout) {
      state.counters["logical_bytes/s"] = rate(cluster.routes().total());
      state.counters["wire_bytes/s"] = rate(cluster.routes().total_between_ranks());
    }
    state.counters["sms"] = call.sms;
  };
  add(sweeps, {.name = name + sizes(shape) + "/sms:" + std::to_string(call.sms),
               .shape = shape,
               .prepare = preparation(call, row_bytes),
               .round = round(call),
               .count = count});
}

/// The data-moving calls at one point.
void add_calls(const Sweeps& sweeps, const std::string& axis, const tools::WorkloadShape& shape, int sms) {
  add_call(sweeps, axis, shape, {Operation::cached_dispatch, true, sms});
  add_call(sweeps, axis, shape, {Operation::cached_dispatch, false, sms});
  add_call(sweeps, axis, shape, {Operation::combine_pull, false, sms});
  add_call(sweeps, axis, shape, {Operation::combine_push, false, sms});
}

void add_others(const Sweeps& sweeps, const std::string& axis, const tools::WorkloadShape& shape) {
  if (sweeps.device != Device::Kind::cuda) return;
  for (const bool as_8bit : {true, false}) {
#if DEEP_EP_HAVE_NCCL
    add_call(sweeps, axis, shape, {Operation::nccl, as_8bit, 0});
#endif
    add_call(sweeps, axis, shape, {Operation::copy_engine, as_8bit, 0});
  }
}

void add_intranode(const IntranodeSweeps& sweeps) {
  sweeps.each([&](const std::string& axis, const tools::WorkloadShape& shape) {
    if (axis == "tokens") add_call(sweeps, axis, shape, {Operation::layout, false, 0});
    add_calls(sweeps, axis, shape, sweeps.sms);
    if (axis == "tokens") {
      add_call(sweeps, axis, shape, {Operation::dispatch, true, sweeps.sms});
      add_call(sweeps, axis, shape, {Operation::dispatch, false, sweeps.sms});
    }
    if (axis == "tokens" || axis == "ranks") add_others(sweeps, axis, shape);
  });
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
  const std::string sizes_word = take_option(argc, argv, "--sizes", "auto");
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  int ranks = std::stoi(ranks_word);
  if (ranks <= 0) ranks = device_word != "cpu" && cuda_device_count() > 1 ? cuda_device_count() : 4;
  const Device::Kind device = tools::choose_device(device_word, ranks);
  add_intranode(make_sweeps(device, ranks, sizes_word == "full"));
  add_low_latency(device, ranks, sizes_word == "full");
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
