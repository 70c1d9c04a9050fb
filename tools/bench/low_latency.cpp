#include "tools/bench/low_latency.hpp"

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>

#include "tools/bench/check.hpp"
#include "tools/bench/graph.hpp"

namespace deep_ep::tools {
namespace {

/// One rank's part in the measurements for one number of tokens.
class LowLatencyMeasurer {
 public:
  LowLatencyMeasurer(const LowLatencyOptions& options, const WorkloadShape& shape, const Routes& routes,
                     const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor,
                     const Figure& setting, const FigureReport& report)
      : options_(options),
        setting_(setting),
        shape_(shape),
        routes_(routes),
        executor_(*executor),
        rank_(bootstrap->rank()),
        report_(report),
        reach_(reach_of(options, shape.ranks)),
        bench_(shape, bootstrap, executor, reach_),
        meter_(*bootstrap, *executor, bench_.stream()),
        filler_(make_filler(*executor, 1)) {
    if (!filler_) return;
    meter_.put_in_front([this] {
      executor_.fill(filler_->view().data, 0, filler_->view().bytes(), bench_.stream());
      bench_.buffer().low_latency_clean(bench_.stream());  // a barrier of the devices
    });
  }

  void run() {
    if (options_.arrivals) bench_.count_arrivals();
    bench_.receive_for_combine();
    constexpr Rows kRows[] = {{"fp8", RowFormat::fp8},
                              {"bf16", RowFormat::bf16},
                              {"fp8-token", RowFormat::fp8_token},
                              {"nvfp4", RowFormat::nvfp4}};
    for (const Rows& rows : kRows) {
      const bool usual = rows.format == RowFormat::fp8 || rows.format == RowFormat::bf16;
      if (options_.dtype == rows.name || (usual && options_.dtype == "both")) measure_dispatch(rows);
    }
    for (const auto kind : {LowLatencyCombine::plain, LowLatencyCombine::zero_copy}) measure_combine(kind);
    if (options_.combine_fp8) measure_combine(LowLatencyCombine::fp8);
    measure_both();
    bench_.destroy();
  }

 private:
  using RowFormat = oracle::RowFormat;
  struct Bytes {
    double selected;  ///< a row for every selection, as upstream's test counts, mean over ranks
    double wire;      ///< rows that cross between ranks, one for each token and rank, mean over ranks
  };
  struct Line {
    Figure figure;
    Bytes bytes;
  };
  struct Rows {
    const char* name;
    RowFormat format;
  };

  void measure_dispatch(const Rows& rows) {
    LowLatencyDispatchResult result;
    const auto check = [&] {
      bench_.buffer().check();
      if (options_.check) check_low_latency_dispatch(checked_rank(), rows.format, result);
    };
    const Line line = make_line("dispatch", rows.name, dispatch_bytes(rows.format));
    measure(line, check, [&] { result = bench_.dispatch(rows.format); });
    measure_parts(
        line, check, [&] { result = bench_.dispatch(rows.format, true); }, [&] { result.hook(); });
  }

  void measure_combine(LowLatencyCombine kind) {
    LowLatencyCombineResult result;
    const auto check = [&] {
      bench_.buffer().check();
      if (options_.check) check_low_latency_combine(checked_rank(), kind, reach_, result);
    };
    const Line line = make_line("combine", name_of(kind), combine_bytes(kind));
    measure(line, check, [&] { result = bench_.combine(kind); });
    measure_parts(
        line, check, [&] { result = bench_.combine(kind, true); }, [&] { result.hook(); });
  }

  /// What upstream's test calls "Dispatch + combine bandwidth".
  void measure_both() {
    LowLatencyDispatchResult dispatched;
    LowLatencyCombineResult combined;
    const Bytes dispatch = dispatch_bytes(RowFormat::fp8);
    const Bytes combine = combine_bytes(LowLatencyCombine::plain);
    measure(
        make_line("dispatch+combine", "fp8", {dispatch.selected + combine.selected, dispatch.wire + combine.wire}),
        [this] { bench_.buffer().check(); },
        [&] {
          dispatched = bench_.dispatch(true);
          combined = bench_.combine(LowLatencyCombine::plain);
        });
  }

  template <class Check, class Call>
  void measure(Line line, const Check& check, const Call& call) {
    const Timing timing = meter_.measure(options_.rounds, call);
    check_after(check, call);
    add(line, "whole", timing, meter_.host_seconds(options_.rounds, call));
    if (!options_.graphs) return;
    const auto graph = record_graph(executor_, bench_.stream(), call);
    if (graph == nullptr) return;
    const auto launch = [&] { graph->launch(bench_.stream()); };
    const Timing replayed = meter_.measure(options_.rounds, launch);
    const double host = meter_.host_seconds(options_.rounds, launch);
    check_after(check, launch);
    add(line, "graph", replayed, host);
  }

  /// Checks a call that follows calls with other rows, one for each half of the window.
  template <class Check, class Call>
  void check_after(const Check& check, const Call& call) {
    if (options_.check) {
      bench_.spoil();
      call();
      call();
      bench_.restore();
      call();
    }
    executor_.synchronize(bench_.stream());
    check();
  }

  template <class Check, class Send, class Receive>
  void measure_parts(Line line, const Check& check, const Send& send, const Receive& receive) {
    if (!options_.hooks) return;
    measure_parts(line, "", {}, check, send, receive);
    if (options_.late_us == 0) return;
    measure_parts(line, " late", {options_.late_us * 1e-6, rank_ == options_.late_rank}, check, send, receive);
  }

  template <class Check, class Send, class Receive>
  void measure_parts(Line line, const char* suffix, const Lateness& late, const Check& check, const Send& send,
                     const Receive& receive) {
    const auto [of_send, of_receive] = meter_.measure_parts(options_.rounds, send, receive, late);
    check_after(check, [&] {
      send();
      receive();
    });
    add(line, std::string("send") + suffix, of_send);
    add(line, std::string("receive") + suffix, of_receive);
  }

  Bytes dispatch_bytes(RowFormat format) const {
    const std::int64_t row =
        oracle::row_bytes(format, shape_.hidden) +
        4 * (oracle::float_scales(format, shape_.hidden) + oracle::packed_scales(format, shape_.hidden));
    // Upstream counts 16 bytes on top of each 8-bit row.
    return bytes(format == RowFormat::bf16 ? row : row + 16, row);
  }
  Bytes combine_bytes(LowLatencyCombine kind) const {
    const std::int64_t row = kind == LowLatencyCombine::fp8 ? shape_.row_bytes_8bit() : shape_.row_bytes_bf16();
    return bytes(row, row);
  }
  Bytes bytes(std::int64_t selected_row, std::int64_t wire_row) const {
    return {static_cast<double>(shape_.tokens * shape_.topk) * static_cast<double>(selected_row),
            static_cast<double>(routes_.total_between_ranks()) * static_cast<double>(wire_row) / shape_.ranks};
  }

  CheckedRank checked_rank() { return {executor_, bench_.stream(), shape_, routes_, rank_}; }

  Line make_line(const std::string& operation, const char* variant, const Bytes& bytes) const {
    Line line{setting_, bytes};
    line.figure.operation = operation;
    line.figure.dtype = operation == "combine" ? "bf16" : variant;
    line.figure.mode = operation == "combine" ? variant : "-";
    line.figure.tokens = shape_.tokens;
    return line;
  }

  /// `host`: seconds that a call keeps the host busy; 0 of parts, whose bytes are not known either.
  void add(const Line& line, const std::string& part, const Timing& timing, double host = 0) {
    if (rank_ != 0) return;
    Figure figure = line.figure;
    figure.part = part;
    set_times(figure, timing);
    const double seconds = timing.back_to_back > 0 ? timing.back_to_back : timing.median;
    if (host > 0 && seconds > 0) {
      figure.host_us = host * 1e6;
      figure.gb_per_s = line.bytes.selected / seconds * 1e-9;
      if (line.bytes.wire > 0) figure.nvlink_wire_gb_per_s = line.bytes.wire / seconds * 1e-9;
    }
    report_(figure);
  }

  const LowLatencyOptions& options_;
  const Figure& setting_;
  const WorkloadShape& shape_;
  const Routes& routes_;
  Executor& executor_;
  int rank_;
  const FigureReport& report_;
  LowLatencyReach reach_;
  LowLatencyBench bench_;
  Meter meter_;
  std::unique_ptr<DeviceTensor> filler_;
};

}  // namespace

LowLatencyReach reach_of(const LowLatencyOptions& options, int ranks) {
  const auto& word = options.rails;
  return {.ranks_per_node = options.nodes == 0 ? 0 : ranks / options.nodes,
          .nvlink = options.nvlink,
          .rails = word == "always"  ? LowLatencyRails::always
                   : word == "never" ? LowLatencyRails::never
                                     : LowLatencyRails::automatic};
}

std::unique_ptr<DeviceTensor> make_filler(Executor& executor, int calls) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  return std::make_unique<DeviceTensor>(executor, DType::uint8,
                                        std::initializer_list<std::int64_t>{calls * (std::int64_t{256} << 20)});
}

void run_low_latency(const LowLatencyOptions& options, const World& world, Device::Kind device, const Figure& setting,
                     const FigureReport& report) {
  std::vector<WorkloadShape> shapes;
  for (const std::int64_t tokens : options.tokens) {
    shapes.push_back({world.size, tokens, options.hidden, options.topk, options.experts});
  }
  run_workloads(world, device, shapes,
                [&](const WorkloadShape& shape, const Routes& routes, const std::shared_ptr<Bootstrap>& bootstrap,
                    const std::shared_ptr<Executor>& executor) {
                  LowLatencyMeasurer(options, shape, routes, bootstrap, executor, setting, report).run();
                });
}

}  // namespace deep_ep::tools
