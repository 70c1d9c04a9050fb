#include "benchmarks/low_latency.hpp"

#include <cstdint>
#include <memory>
#include <string>

#include "benchmarks/sweeps.hpp"

namespace deep_ep::benchmarks {
namespace {

enum class Operation { dispatch_fp8, dispatch_bf16, combine, both };

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::dispatch_fp8:
      return "dispatch/fp8";
    case Operation::dispatch_bf16:
      return "dispatch/bf16";
    case Operation::combine:
      return "combine/bf16";
    case Operation::both:
      return "dispatch+combine/fp8";
  }
  return "?";
}

Sweeps make_sweeps(Device::Kind device, int ranks, bool full) {
  Sweeps sweeps;
  sweeps.device = device;
  sweeps.warmup = device == Device::Kind::cuda ? 20 : 1;
  sweeps.iterations = device == Device::Kind::cuda ? 100 : 3;
  sweeps.ranks = Sweeps::rank_counts(ranks);
  sweeps.base.ranks = ranks;
  sweeps.base.tokens = 128;
  sweeps.base.experts = (288 + ranks - 1) / ranks * ranks;
  if (Sweeps::large(device, full)) {
    sweeps.tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512};
    sweeps.hidden = {2048, 4096, 7168, 8192};
    sweeps.topk = {1, 2, 4, 8, 16};
  } else {
    sweeps.base.tokens = 8;
    sweeps.base.hidden = 1024;
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

void run_round(Operation operation, bool hooks, tools::LowLatencyBench& bench) {
  switch (operation) {
    case Operation::dispatch_fp8:
      return dispatch(bench, true, hooks);
    case Operation::dispatch_bf16:
      return dispatch(bench, false, hooks);
    case Operation::combine:
      return combine(bench, tools::LowLatencyCombine::plain, hooks);
    case Operation::both:
      dispatch(bench, true, hooks);
      return combine(bench, tools::LowLatencyCombine::plain, hooks);
  }
}

std::int64_t row_bytes(Operation operation, const tools::WorkloadShape& shape) {
  switch (operation) {
    case Operation::dispatch_fp8:
      return shape.row_bytes_8bit();
    case Operation::dispatch_bf16:
    case Operation::combine:
      return shape.row_bytes_bf16();
    case Operation::both:
      return shape.row_bytes_8bit() + shape.row_bytes_bf16();
  }
  return 0;
}

void add_call(const Sweeps& sweeps, const std::string& axis, const tools::WorkloadShape& shape, Operation operation,
              bool hooks) {
  add(sweeps, {.name = "low_latency_" + axis + "/" + name_of(operation) + (hooks ? "/hooks" : "") + sizes(shape),
               .shape = shape,
               .prepare =
                   [shape](RankContext& context) {
                     context.low_latency =
                         std::make_unique<tools::LowLatencyBench>(shape, context.bootstrap, context.executor);
                     context.low_latency->receive_for_combine();
                   },
               .round = [operation, hooks](RankContext& context) { run_round(operation, hooks, *context.low_latency); },
               .count =
                   [shape, operation](benchmark::State& state, const Cluster&) {
                     // With a row for every selection, mean over ranks.
                     const auto bytes = static_cast<double>(shape.tokens * shape.topk * row_bytes(operation, shape));
                     state.counters["selected_bytes/s"] =
                         benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
                   }});
}

}  // namespace

void add_low_latency(Device::Kind device, int ranks, bool full) {
  const Sweeps sweeps = make_sweeps(device, ranks, full);
  sweeps.each([&](const std::string& axis, const tools::WorkloadShape& shape) {
    for (const Operation operation :
         {Operation::dispatch_fp8, Operation::dispatch_bf16, Operation::combine, Operation::both}) {
      for (const bool hooks : {false, true}) add_call(sweeps, axis, shape, operation, hooks);
    }
  });
}

}  // namespace deep_ep::benchmarks
