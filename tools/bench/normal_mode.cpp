#include "tools/bench/normal_mode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "bench_support/normal_mode_rank.hpp"
#include "bench_support/peers.hpp"
#include "tools/bench/check.hpp"

namespace deep_ep::tools {
namespace {

/// One rank's part in the measurements for one number of tokens.
class NormalModeMeasurer {
 public:
  NormalModeMeasurer(const NormalModeOptions& options, const WorkloadShape& shape, const Routes& routes,
                     const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor,
                     const std::function<void(const Measurement&)>& report)
      : options_(options),
        shape_(shape),
        routes_(routes),
        bootstrap_(*bootstrap),
        executor_(*executor),
        rank_(bootstrap->rank()),
        report_(report),
        crossings_(routes.crossings()),
        bench_(shape, routes, bootstrap, executor),
        meter_(*bootstrap, *executor, bench_.stream()) {}

  void run() {
    if (options_.uncached) {
      DispatchLayout layout;
      add({.operation = "layout", .dtype = "-", .mode = "-"},
          meter_.measure(options_.rounds, [&] { layout = bench_.layout(); }));
    }
    for (const Config& config : configs()) {
      for (const bool as_8bit : {true, false}) {
        if (options_.dtype == (as_8bit ? "bf16" : "fp8")) continue;
        measure_dispatch(as_8bit, false, config);
        if (options_.uncached) measure_dispatch(as_8bit, true, config);
      }
      if (options_.mode != "push") measure_combine(CombineMode::pull, config);
      if (options_.mode != "pull") measure_combine(CombineMode::push, config);
    }
    if (options_.peers) {
      measure_transport(make_nccl_transport(bootstrap_, executor_));
      measure_transport(make_copy_engine_transport(bootstrap_, executor_));
    }
    bench_.destroy();
  }

 private:
  void measure_dispatch(bool as_8bit, bool exchange, const Config& config) {
    CachedDispatchResult result;
    const auto call = [&] {
      result = {};  // a round's rows are given back before the next ones are asked for
      result = exchange ? rows_of(bench_.dispatch(as_8bit, config)) : bench_.cached_dispatch(as_8bit, config);
    };
    const Timing timing = meter_.measure(options_.rounds, call);
    const double host = exchange ? 0 : host_seconds(call);
    bench_.buffer().check();
    if (options_.check) {
      const auto check = as_8bit ? check_dispatched_8bit : check_dispatched_bf16;
      check(checked_rank(), result);
    }
    Measurement measurement{.operation = exchange ? "layout+notify+dispatch" : "dispatch",
                            .dtype = as_8bit ? "fp8" : "bf16",
                            .mode = exchange ? "exchange" : "cached"};
    measurement.host = host;
    measurement.warps = config.warps_per_block;
    measurement.sms = sms_used(config, Config::dispatch_default(shape_.ranks));
    set_bytes(measurement, as_8bit ? shape_.row_bytes_8bit() : shape_.row_bytes_bf16());
    add(measurement, timing);
  }

  void measure_combine(CombineMode mode, const Config& config) {
    bench_.receive_for_combine(mode);
    CombineResult result;
    const auto call = [&] {
      result = {};
      result = bench_.combine(mode, config);
    };
    const Timing timing = meter_.measure(options_.rounds, call);
    const double host = host_seconds(call);
    bench_.buffer().check();
    if (options_.check) check_combined(checked_rank(), result);
    bench_.release_rows();
    const bool pull = mode == CombineMode::pull;
    Measurement measurement{.operation = "combine", .dtype = "bf16", .mode = pull ? "pull" : "push"};
    if (shape_.nodes > 1) measurement.mode = pull ? "in heap" : "copied";
    measurement.host = host;
    measurement.warps = config.warps_per_block;
    measurement.sms = sms_used(config, Config::combine_default(shape_.ranks));
    set_bytes(measurement, shape_.row_bytes_bf16());
    add(measurement, timing);
  }

  /// Of calls that do not wait for the device, between nodes.
  double host_seconds(const std::function<void()>& call) {
    return shape_.nodes > 1 ? meter_.host_seconds(options_.rounds, call) : 0;
  }

  void measure_transport(std::unique_ptr<PeerTransport> transport) {
    if (transport == nullptr) return;
    if (options_.dtype != "bf16") measure_transport(*transport, "dispatch", "fp8", shape_.row_bytes_8bit());
    if (options_.dtype != "fp8") measure_transport(*transport, "dispatch", "bf16", shape_.row_bytes_bf16());
    measure_transport(*transport, "combine", "bf16", shape_.row_bytes_bf16());
  }

  void measure_transport(PeerTransport& transport, const char* operation, const char* dtype, std::int64_t row_bytes) {
    std::vector<std::int64_t> send = bench_.bytes_to_peers(row_bytes);
    std::vector<std::int64_t> receive = bench_.bytes_from_peers(row_bytes);
    if (std::string_view(operation) == "combine") std::swap(send, receive);
    transport.prepare(send, receive);
    Measurement measurement{.operation = operation,
                            .dtype = dtype,
                            .mode = "same bytes",
                            .transport = transport.name(),
                            .sms = transport.num_sms()};
    set_bytes(measurement, row_bytes);
    add(measurement, meter_.measure(options_.rounds, [&] { transport.enqueue(bench_.stream()); }));
  }

  CheckedRank checked_rank() { return {executor_, bench_.stream(), shape_, routes_, rank_}; }

  std::vector<Config> configs() const {
    std::vector<Config> all;
    for (const int sms : options_.sms) {
      for (const int warps : options_.warps) all.push_back({.num_sms = sms, .warps_per_block = warps});
    }
    return all;
  }

  int sms_used(const Config& config, const Config& library_default) const {
    return std::min(config.num_sms != 0 ? config.num_sms : library_default.num_sms, executor_.policy().multiprocessors);
  }

  void set_bytes(Measurement& measurement, std::int64_t row_bytes) const {
    const double bytes_a_rank = static_cast<double>(row_bytes) / shape_.ranks;
    measurement.logical_bytes = static_cast<double>(routes_.total()) * bytes_a_rank;
    measurement.wire_bytes = static_cast<double>(crossings_.over_nvlink) * bytes_a_rank;
    measurement.rdma_bytes = static_cast<double>(crossings_.between_nodes) * bytes_a_rank;
    measurement.to_nodes_bytes = static_cast<double>(crossings_.to_nodes) * bytes_a_rank;
  }

  void add(Measurement measurement, const Timing& timing) {
    if (measurement.transport.empty()) measurement.transport = "deep_ep";
    measurement.tokens = shape_.tokens;
    measurement.timing = timing;
    if (rank_ == 0) report_(measurement);
  }

  const NormalModeOptions& options_;
  const WorkloadShape& shape_;
  const Routes& routes_;
  Bootstrap& bootstrap_;
  Executor& executor_;
  int rank_;
  const std::function<void(const Measurement&)>& report_;
  Routes::Crossings crossings_;
  NormalModeBench bench_;
  Meter meter_;
};

}  // namespace

void run_normal_mode(const NormalModeOptions& options, const World& world, Device::Kind device,
                     const std::function<void(const Measurement&)>& report) {
  std::vector<WorkloadShape> shapes;
  for (const std::int64_t tokens : options.tokens) {
    shapes.push_back({world.size, tokens, options.hidden, options.topk, options.experts,
                      static_cast<std::size_t>(options.window_mib) << 20, options.nodes, options.groups});
  }
  run_workloads(world, device, shapes,
                [&](const WorkloadShape& shape, const Routes& routes, const std::shared_ptr<Bootstrap>& bootstrap,
                    const std::shared_ptr<Executor>& executor) {
                  NormalModeMeasurer(options, shape, routes, bootstrap, executor, report).run();
                });
}

}  // namespace deep_ep::tools
