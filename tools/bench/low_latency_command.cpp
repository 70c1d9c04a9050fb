// `deep_ep bench low-latency`: how long the calls for decoding take.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "csrc/support/format.hpp"
#include "tools/bench/benchmark.hpp"
#include "tools/bench/gpu.hpp"
#include "tools/bench/low_latency_rank.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

constexpr BenchKind kLowLatency = {
    .name = "low-latency",
    .gpu = {.tokens = 128, .hidden = 7168, .experts = 288, .rounds = 100, .warmup = 20},
    .cpu = {.tokens = 16, .hidden = 1024, .experts = 288, .rounds = 10, .warmup = 2},
    .quick_gpu = {.tokens = 32, .hidden = 7168, .experts = 288, .rounds = 10, .warmup = 3},
    .quick_cpu = {.tokens = 4, .hidden = 256, .experts = 16, .rounds = 2, .warmup = 1},
    .limits = {.fewest_tokens = 1, .most_tokens = 8192, .hidden_multiple = 128, .most_experts = 65535},
    .dtype_help = "Dispatched rows: fp8 (cast by the call), bf16 or both; nvfp4",
    .has_nvfp4 = true,
};

struct LowLatencyBenchOptions : BenchOptions {
  LowLatencyBenchOptions() { nodes = 0; }

  bool nvlink = true;          ///< false: all ranks reach each other by RDMA
  bool masking = false;        ///< buffers with LowLatencyOptions::masking
  bool weights = false;        ///< dispatches bring the weights of combine
  std::string rails = "auto";  ///< rows between nodes by rails: auto, always, never
  bool graphs = true;          ///< also replays of CUDA graphs, where there are any

  /// The options of buffers, but for sizes.
  BufferOptions buffer(int ranks) const {
    BufferOptions options;
    options.ranks_per_node = nodes == 0 ? 0 : ranks / nodes;
    options.low_latency.allow_nvlink = nvlink;
    options.low_latency.masking = masking;
    if (rails == "always") options.low_latency.rails = LowLatencyRails::always;
    if (rails == "never") options.low_latency.rails = LowLatencyRails::never;
    return options;
  }
};

/// One rank's part in the measurements for one number of tokens. Operations are "dispatch", "combine" and
/// "dispatch+combine"; parts "whole", "send", "receive" and "graph". Rates are those of the time back to back.
class LowLatencyMeasurer {
 public:
  LowLatencyMeasurer(const LowLatencyBenchOptions& options, const RankTask& task, const Figure& common, Report& report)
      : options_(options),
        task_(task),
        shape_(task.shape),
        executor_(*task.executor),
        common_(common),
        report_(report),
        rank_(task, options.buffer(task.shape.ranks), options.weights),
        meter_(*task.bootstrap, executor_, rank_.stream()) {
    if (executor_.device().kind == Device::Kind::cpu) return;
    // It takes a GPU longer to fill than the host needs to enqueue a call.
    filler_.emplace(executor_, DType::uint8, std::initializer_list<std::int64_t>{std::int64_t{256} << 20});
    meter_.put_in_front([this] {
      executor_.fill(filler_->view().data, 0, filler_->view().bytes(), rank_.stream());
      rank_.buffer().low_latency_clean(rank_.stream());  // a barrier of the devices
    });
  }

  void run() {
    rank_.receive_for_combine();
    const auto dispatch = [&](const char* name, RowFormat format, bool usual = false) {
      if (options_.dtype == name || (usual && options_.dtype == "both")) measure_dispatch(name, format);
    };
    dispatch("fp8", RowFormat::fp8, true);
    dispatch("bf16", RowFormat::bf16, true);
    dispatch("nvfp4", RowFormat::nvfp4);
    measure_combine();
    measure_both();
    rank_.destroy();
  }

 private:
  using RowFormat = oracle::RowFormat;
  struct Bytes {
    double selected;  ///< a row for every selection, as upstream's test counts, mean over ranks
    double wire;      ///< rows that cross between ranks, one for each token and rank, mean over ranks
  };

  void measure_dispatch(const char* name, RowFormat format) {
    LowLatencyDispatchResult result;
    const auto call = [&](bool hook) { result = rank_.dispatch(format, hook); };
    measure_call(figure_of(common_, shape_, "dispatch", name, "-"), dispatch_bytes(format), result, call,
                 [&] { rank_.check_dispatched(format, result); });
  }

  void measure_combine() {
    LowLatencyCombineResult result;
    const auto call = [&](bool hook) { result = rank_.combine(hook); };
    measure_call(figure_of(common_, shape_, "combine", "bf16", "plain"), combine_bytes(), result, call,
                 [&] { rank_.check_combined(result); });
  }

  /// The figure that upstream's test calls "Dispatch + combine bandwidth".
  void measure_both() {
    LowLatencyDispatchResult dispatched;
    LowLatencyCombineResult combined;
    const Bytes dispatch = dispatch_bytes(RowFormat::fp8);
    const Bytes combine = combine_bytes();
    const auto call = [&] {
      dispatched = rank_.dispatch(RowFormat::fp8);
      combined = rank_.combine();
    };
    measure_whole(figure_of(common_, shape_, "dispatch+combine", "fp8", "-"),
                  {dispatch.selected + combine.selected, dispatch.wire + combine.wire}, call, [] {});
  }

  /// The whole call, and its parts. `call(true)` leaves a hook in `result`.
  template <class Result, class Call, class Check>
  void measure_call(const Figure& figure, const Bytes& bytes, Result& result, const Call& call, const Check& check) {
    measure_whole(
        figure, bytes, [&] { call(false); }, check);
    const auto send = [&] { call(true); };
    const auto receive = [&] { result.hook(); };
    const auto [of_send, of_receive] = meter_.measure_parts(options_.rounds, send, receive);
    check_after(check, [&] {
      send();
      receive();
    });
    add(figure, "send", of_send);
    add(figure, "receive", of_receive);
  }

  template <class Call, class Check>
  void measure_whole(const Figure& figure, const Bytes& bytes, const Call& call, const Check& check) {
    const Timing timing = meter_.measure(options_.rounds, call);
    check_after(check, call);
    add(figure, "whole", timing, bytes);
    const auto graph = options_.graphs ? record_graph(executor_, rank_.stream(), call) : nullptr;
    if (graph == nullptr) return;
    const auto launch = [&] { graph(rank_.stream()); };
    const Timing replayed = meter_.measure(options_.rounds, launch);
    check_after(check, launch);
    add(figure, "graph", replayed, bytes);
  }

  /// Checks a call that follows calls with other rows, one for each half of the window.
  template <class Check, class Call>
  void check_after(const Check& check, const Call& call) {
    if (options_.check) {
      rank_.spoil();
      call();
      call();
      rank_.restore();
      call();
    }
    executor_.synchronize(rank_.stream());
    rank_.buffer().check();
    if (options_.check) check();
  }

  Bytes dispatch_bytes(RowFormat format) const {
    const std::int64_t row = oracle::row_bytes(format, shape_.hidden) + 4 * oracle::scale_words(format, shape_.hidden);
    // Upstream counts 16 bytes on top of each 8-bit row.
    return bytes(format == RowFormat::bf16 ? row : row + 16, row);
  }
  Bytes combine_bytes() const { return bytes(shape_.row_bytes_bf16(), shape_.row_bytes_bf16()); }
  Bytes bytes(std::int64_t selected_row, std::int64_t wire_row) const {
    return {static_cast<double>(shape_.tokens * shape_.topk) * static_cast<double>(selected_row),
            static_cast<double>(task_.routes.total_between_ranks()) * static_cast<double>(wire_row) / shape_.ranks};
  }

  /// Parts have no rounds back to back, and their bytes are not known.
  void add(Figure figure, const char* part, const Timing& timing, const Bytes& bytes = {}) {
    if (task_.rank() != 0) return;
    figure.part = part;
    set_times(figure, timing);
    const double seconds = timing.back_to_back;
    if (seconds > 0) {
      figure.host_us = timing.host * 1e6;
      figure.gb_per_s = bytes.selected / seconds * 1e-9;
      if (bytes.wire > 0) figure.nvlink_wire_gb_per_s = bytes.wire / seconds * 1e-9;
    }
    report_.add(figure);
  }

  const LowLatencyBenchOptions& options_;
  const RankTask& task_;
  const WorkloadShape& shape_;
  Executor& executor_;
  const Figure& common_;
  Report& report_;
  LowLatencyRank rank_;
  Meter meter_;
  std::optional<DeviceTensor> filler_;
};

std::string explanation(const LowLatencyBenchOptions& options, Device::Kind device) {
  std::string text;
  if (options.nodes > 1)
    text += fmt::format("The ranks play {} nodes, and reach other nodes by RDMA.\n", options.nodes);
  text += options.masking ? "Buffers with masking, whose rows never go by rails.\n"
                          : fmt::format("Rows between nodes by rails: {}.\n", options.rails);
  if (options.weights) text += "Dispatches bring the weights of combine.\n";
  if (!options.nvlink) text += "No NVLink: the ranks reach each other by RDMA.\n";
  return text +
         fmt::format(
             "A round lasts as long as its slowest rank. median, min, max: by device events around {}.\n"
             "pipelined: median of rounds enqueued back to back. host: what a call keeps the host.\n"
             "GB/s: selected: with a row for every selection, as DeepEP's test counts; NVLink: rows between ranks.\n",
             device == Device::Kind::cuda ? "the call's kernels, behind a barrier of the GPUs" : "the call");
}

int run_low_latency_bench(LowLatencyBenchOptions options) {
  BenchRun run(kLowLatency, options);
  if (options.masking || options.weights) run.common.note = options.masking ? "masking" : "weights";
  Report report(options.csv, run.speaks,
                {{{"tokens", &Figure::tokens}, 7},
                 {{"operation", &Figure::operation}, 16},
                 {{"dtype", &Figure::dtype}, 9},
                 {{"mode", &Figure::mode}, 9},
                 {{"part", &Figure::part}, 7},
                 {{"median us", &Figure::median_us}, 9},
                 {{"min", &Figure::min_us}, 8},
                 {{"max", &Figure::max_us}, 8},
                 {{"pipelined us", &Figure::pipelined_us}, 12},
                 {{"host us", &Figure::host_us}, 8},
                 {{"selected", &Figure::gb_per_s}, 9, true},
                 {{"NVLink GB/s", &Figure::nvlink_wire_gb_per_s}, 11, true}});
  report.begin(run.text + explanation(options, run.device));
  run.measure([&](const RankTask& task) { LowLatencyMeasurer(options, task, run.common, report).run(); });
  if (report.prints_text()) {
    fmt::print("{}{}", low_latency_lines(options, run.world.size(), report.figures()),
               options.check ? "\nEvery checked result is right.\n" : "");
  }
  return 0;
}

}  // namespace

void add_bench_low_latency(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "low-latency", "Dispatch and combine for decoding: a thread for every GPU, or a process when started by mpirun");
  auto options = std::make_shared<LowLatencyBenchOptions>();
  LowLatencyBenchOptions& o = *options;
  add_options(*command, kLowLatency, o);
  add_number(*command, "--nodes", o.nodes, 1, kMostRanks, "Nodes that the ranks play; they reach other nodes by RDMA");
  add_off_flag(*command, "--no-nvlink,--disable-nvlink", o.nvlink, "Reach all ranks by RDMA");
  command
      ->add_option("--rails", o.rails,
                   "Send rows once for each node, not for each rank: where it should pay, always, or never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  add_off_flag(*command, "--no-graphs", o.graphs, "Leave out replays of CUDA graphs");
  command->add_flag("--weights", o.weights, "Give the weights of combine to dispatch, as combine_weights");
  command->add_flag("--masking", o.masking, "Buffers that mask a rank that does not come, as low_latency.masking does");
  command->callback([options, &action] { action = [options] { return run_low_latency_bench(*options); }; });
}

}  // namespace deep_ep::tools
