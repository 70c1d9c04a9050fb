#include "tools/bench/normal_mode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "tools/bench/check.hpp"
#include "tools/bench/normal_mode_rank.hpp"
#include "tools/bench/peers.hpp"

namespace deep_ep::tools {
namespace {

/// One rank's part in the measurements for one number of tokens.
class NormalModeMeasurer {
 public:
  NormalModeMeasurer(const NormalModeOptions& options, const WorkloadShape& shape, const Routes& routes,
                     const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor,
                     const Figure& setting, const FigureReport& report)
      : options_(options),
        setting_(setting),
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
      report(named("layout", "-", "-"), meter_.measure(options_.rounds, [&] { layout = bench_.layout(); }));
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
    bench_.buffer().check();
    if (options_.check) {
      const auto check = as_8bit ? check_dispatched_8bit : check_dispatched_bf16;
      check(checked_rank(), result);
    }
    Figure figure = exchange ? named("layout+notify+dispatch", as_8bit ? "fp8" : "bf16", "exchange")
                             : named("dispatch", as_8bit ? "fp8" : "bf16", "cached");
    set_shape(figure, config, Config::dispatch_default(shape_.ranks));
    if (!exchange) set_host(figure, call);
    report(figure, timing, as_8bit ? shape_.row_bytes_8bit() : shape_.row_bytes_bf16());
  }

  void measure_combine(CombineMode mode, const Config& config) {
    bench_.receive_for_combine(mode);
    CombineResult result;
    const auto call = [&] {
      result = {};
      result = bench_.combine(mode, config);
    };
    const Timing timing = meter_.measure(options_.rounds, call);
    const bool pull = mode == CombineMode::pull;
    Figure figure =
        named("combine", "bf16", shape_.nodes == 1 ? (pull ? "pull" : "push") : (pull ? "in heap" : "copied"));
    set_shape(figure, config, Config::combine_default(shape_.ranks));
    set_host(figure, call);
    bench_.buffer().check();
    if (options_.check) check_combined(checked_rank(), result);
    bench_.release_rows();
    report(figure, timing, shape_.row_bytes_bf16());
  }

  Figure named(const char* operation, const char* dtype, const char* mode) const {
    Figure figure = setting_;
    figure.operation = operation;
    figure.dtype = dtype;
    figure.mode = mode;
    figure.tokens = shape_.tokens;
    return figure;
  }

  void set_shape(Figure& figure, const Config& config, const Config& library_default) const {
    const int sms =
        std::min(config.num_sms != 0 ? config.num_sms : library_default.num_sms, executor_.policy().multiprocessors);
    if (sms > 0) figure.sms = sms;
    if (config.warps_per_block != 0) figure.warps = config.warps_per_block;
  }

  /// Of calls that do not wait for the device, between nodes.
  void set_host(Figure& figure, const std::function<void()>& call) {
    if (shape_.nodes > 1) figure.host_us = meter_.host_seconds(options_.rounds, call) * 1e6;
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
    Figure figure = named(operation, dtype, "same bytes");
    figure.by = transport.name();
    if (transport.num_sms() > 0) figure.sms = transport.num_sms();
    report(figure, meter_.measure(options_.rounds, [&] { transport.enqueue(bench_.stream()); }), row_bytes);
  }

  CheckedRank checked_rank() { return {executor_, bench_.stream(), shape_, routes_, rank_}; }

  std::vector<Config> configs() const {
    std::vector<Config> all;
    for (const int sms : options_.sms) {
      for (const int warps : options_.warps) all.push_back({.num_sms = sms, .warps_per_block = warps});
    }
    return all;
  }

  /// `row_bytes`: 0 where no rows go anywhere.
  void report(Figure figure, const Timing& timing, std::int64_t row_bytes = 0) {
    set_times(figure, timing);
    const auto set = [&](Figure::Number& rate, std::int64_t rows) {
      const double bytes = static_cast<double>(row_bytes) / shape_.ranks * static_cast<double>(rows);
      if (bytes > 0 && timing.median > 0) rate = bytes / timing.median * 1e-9;
    };
    set(figure.gb_per_s, routes_.total());
    set(figure.nvlink_wire_gb_per_s, crossings_.over_nvlink);
    if (shape_.nodes > 1) {
      set(figure.rdma_gb_per_s, crossings_.to_nodes);
      set(figure.rdma_wire_gb_per_s, crossings_.between_nodes);
    }
    if (rank_ == 0) report_(figure);
  }

  const NormalModeOptions& options_;
  const Figure& setting_;
  const WorkloadShape& shape_;
  const Routes& routes_;
  Bootstrap& bootstrap_;
  Executor& executor_;
  int rank_;
  const FigureReport& report_;
  Routes::Crossings crossings_;
  NormalModeBench bench_;
  Meter meter_;
};

}  // namespace

void run_normal_mode(const NormalModeOptions& options, const World& world, Device::Kind device, const Figure& setting,
                     const FigureReport& report) {
  std::vector<WorkloadShape> shapes;
  for (const std::int64_t tokens : options.tokens) {
    shapes.push_back({world.size, tokens, options.hidden, options.topk, options.experts,
                      static_cast<std::size_t>(options.window_mib) << 20, options.nodes, options.groups});
  }
  run_workloads(world, device, shapes,
                [&](const WorkloadShape& shape, const Routes& routes, const std::shared_ptr<Bootstrap>& bootstrap,
                    const std::shared_ptr<Executor>& executor) {
                  NormalModeMeasurer(options, shape, routes, bootstrap, executor, setting, report).run();
                });
}

}  // namespace deep_ep::tools
