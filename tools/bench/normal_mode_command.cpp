// `deep_ep bench intranode`: how long dispatch and combine take, and NCCL for the same bytes. `deep_ep bench
// internode`: the same for ranks of this host that play several nodes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/buffer/defaults.hpp"
#include "csrc/support/format.hpp"
#include "tools/bench/benchmark.hpp"
#include "tools/bench/gpu.hpp"
#include "tools/bench/normal_mode_rank.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

struct NormalModeOptions : BenchOptions {
  std::vector<int> sms;  ///< 0 = the library's default
  bool nccl = true;      ///< inside a node
  bool tune = false;     ///< several numbers of SMs
  bool uncached = true;  ///< also layout, and dispatch that exchanges counts
};

constexpr BenchKind kIntranode = {
    .name = "intranode",
    .gpu = {.tokens = 4096, .hidden = 7168, .experts = 256, .rounds = 50, .warmup = 10},
    .cpu = {.tokens = 128, .hidden = 2048, .experts = 256, .rounds = 30, .warmup = 2},
    .quick_gpu = {.tokens = 256, .hidden = 7168, .experts = 256, .rounds = 10, .warmup = 3},
    .quick_cpu = {.tokens = 8, .hidden = 256, .experts = 16, .rounds = 2, .warmup = 1},
    .limits = {.fewest_tokens = 0, .most_tokens = 1 << 20, .hidden_multiple = 16, .most_experts = 65536},
    .dtype_help = "Dispatched rows: fp8 (with a scale for every 128 channels), bf16 or both",
};
constexpr BenchKind kInternode = {
    .name = "internode",
    .gpu = kIntranode.gpu,
    .cpu = {.tokens = 64, .hidden = 1024, .experts = 256, .rounds = 10, .warmup = 2},
    .quick_gpu = kIntranode.quick_gpu,
    .quick_cpu = kIntranode.quick_cpu,
    .limits = kIntranode.limits,
    .dtype_help = kIntranode.dtype_help,
};
constexpr int kSmsOfGpu = 24;

std::vector<int> sms_to_try(bool tune, Device::Kind device) {
  if (!tune) return {device == Device::Kind::cuda ? kSmsOfGpu : 0};
  return device == Device::Kind::cuda ? std::vector<int>{4, 8, 12, 16, 20, 24, 32} : std::vector<int>{1, 2, 4};
}

/// One rank's part in the measurements for one number of tokens. Operations are "layout", "dispatch",
/// "layout+notify+dispatch" and "combine"; modes of dispatch "cached" and "exchange", of combine "in heap" and
/// "copied".
class NormalModeMeasurer {
 public:
  NormalModeMeasurer(const NormalModeOptions& options, const RankTask& task, const Figure& common, Report& report)
      : options_(options),
        task_(task),
        shape_(task.shape),
        executor_(*task.executor),
        common_(common),
        report_(report),
        crossings_(task.routes.crossings()),
        rank_(task),
        meter_(*task.bootstrap, executor_, rank_.stream()),
        handle_(rank_.dispatch({}).handle) {}

  void run() {
    if (options_.uncached) {
      DispatchLayout layout;
      report(named("layout", "-", "-"), meter_.measure(options_.rounds, [&] { layout = rank_.layout(); }));
    }
    for (const int sms : options_.sms) measure(sms);
    if (options_.nccl && shape_.nodes == 1) measure_nccl();
    executor_.synchronize(rank_.stream());
    handle_ = {};
    rank_.destroy();
  }

 private:
  void measure(int num_sms) {
    for (const bool fp8 : {true, false}) {
      if (options_.dtype == (fp8 ? "bf16" : "fp8")) continue;
      measure_dispatch({.fp8 = fp8, .num_sms = num_sms}, false);
      if (options_.uncached) measure_dispatch({.fp8 = fp8, .num_sms = num_sms}, true);
    }
    measure_combine(true, num_sms);
    measure_combine(false, num_sms);
  }

  void measure_dispatch(const NormalModeCall& call, bool exchange) {
    DispatchResult result;
    const auto dispatch = [&] {
      result = {};  // a round's rows are given back before the next ones are asked for
      result = exchange ? rank_.dispatch(call) : rank_.dispatch_again(handle_, call);
    };
    const Timing timing = meter_.measure(options_.rounds, dispatch);
    rank_.buffer().check();
    if (options_.check) rank_.check_rows_of(result, call);
    Figure figure = named(exchange ? "layout+notify+dispatch" : "dispatch", call.fp8 ? "fp8" : "bf16",
                          exchange ? "exchange" : "cached");
    set_sms(figure, call.num_sms, defaults::kDispatchSms);
    report(figure, timing, call.fp8 ? shape_.row_bytes_8bit() : shape_.row_bytes_bf16());
  }

  /// Rows lie in the heap, or in ordinary memory, like the output of experts that do not know of the heap.
  void measure_combine(bool in_heap, int num_sms) {
    const DispatchResult received = rank_.dispatch_again(handle_, {});
    const TensorView rows = received.recv_x.view();
    const DeviceTensor ordinary(executor_, rows.dtype, {in_heap ? 0 : rows.size(0), rows.size(1)});
    const std::size_t copied = ordinary.view().bytes();
    if (copied > 0) executor_.copy(ordinary.view().data, rows.data, copied, rank_.stream());
    CombineResult result;
    const auto combine = [&] {
      result = {};
      result = rank_.combine({.x = in_heap ? rows : ordinary.view(), .handle = &handle_}, {.num_sms = num_sms});
    };
    const Timing timing = meter_.measure(options_.rounds, combine);
    Figure figure = named("combine", "bf16", in_heap ? "in heap" : "copied");
    set_sms(figure, num_sms, defaults::kCombineSms);
    rank_.buffer().check();
    if (options_.check) rank_.check_combined(result);
    executor_.synchronize(rank_.stream());
    report(figure, timing, shape_.row_bytes_bf16());
  }

  /// The same bytes between the same ranks.
  void measure_nccl() {
    const std::optional<NcclTransport> nccl = make_nccl_transport(*task_.bootstrap, executor_);
    if (!nccl) return;
    const auto measure = [&](const char* operation, const char* dtype, std::int64_t row_bytes, bool back) {
      std::vector<std::int64_t> send, receive;
      for (int peer = 0; peer < shape_.ranks; ++peer) {
        send.push_back(task_.routes.rows(task_.rank(), peer) * row_bytes);
        receive.push_back(task_.routes.rows(peer, task_.rank()) * row_bytes);
      }
      if (back) std::swap(send, receive);
      const Enqueue exchange = nccl->exchange(send, receive);
      Figure figure = named(operation, dtype, "same bytes");
      figure.by = nccl->name;
      report(figure, meter_.measure(options_.rounds, [&] { exchange(rank_.stream()); }), row_bytes);
    };
    if (options_.dtype != "bf16") measure("dispatch", "fp8", shape_.row_bytes_8bit(), false);
    if (options_.dtype != "fp8") measure("dispatch", "bf16", shape_.row_bytes_bf16(), false);
    measure("combine", "bf16", shape_.row_bytes_bf16(), true);
  }

  Figure named(const char* operation, const char* dtype, const char* mode) const {
    return figure_of(common_, shape_, operation, dtype, mode);
  }

  void set_sms(Figure& figure, int num_sms, int by_default) const {
    const int sms = std::min(num_sms != 0 ? num_sms : by_default, executor_.policy().multiprocessors);
    if (sms > 0) figure.sms = sms;
  }

  /// `row_bytes`: 0 where no rows go anywhere.
  void report(Figure figure, const Timing& timing, std::int64_t row_bytes = 0) {
    set_times(figure, timing);
    // Of calls that do not wait for the device, between nodes.
    if (shape_.nodes > 1 && row_bytes > 0 && figure.mode != "exchange") figure.host_us = timing.host * 1e6;
    const auto set = [&](Figure::Number& rate, std::int64_t rows) {
      const double bytes = static_cast<double>(row_bytes) / shape_.ranks * static_cast<double>(rows);
      if (bytes > 0 && timing.median > 0) rate = bytes / timing.median * 1e-9;
    };
    set(figure.gb_per_s, task_.routes.total());
    set(figure.nvlink_wire_gb_per_s, crossings_.over_nvlink);
    if (shape_.nodes > 1) {
      set(figure.rdma_gb_per_s, crossings_.to_nodes);
      set(figure.rdma_wire_gb_per_s, crossings_.between_nodes);
    }
    if (task_.rank() == 0) report_.add(figure);
  }

  const NormalModeOptions& options_;
  const RankTask& task_;
  const WorkloadShape& shape_;
  Executor& executor_;
  const Figure& common_;
  Report& report_;
  Routes::Crossings crossings_;
  NormalModeRank rank_;
  Meter meter_;
  DispatchHandle handle_;
};

std::vector<TableColumn> table_of(bool one_node) {
  std::vector<TableColumn> table = {{{"tokens", &Figure::tokens}, 7},
                                    {{"operation", &Figure::operation}, 22},
                                    {{"dtype", &Figure::dtype}, 5},
                                    {{"mode", &Figure::mode}, 10},
                                    {{"SMs", &Figure::sms}, 4},
                                    {{"median us", &Figure::median_us}, 10},
                                    {{"min", &Figure::min_us}, 9},
                                    {{"max", &Figure::max_us}, 9},
                                    {{"wall us", &Figure::wall_us}, 10},
                                    {{"pipelined us", &Figure::pipelined_us}, 12},
                                    {{"host us", &Figure::host_us}, 8},
                                    {{"logical", &Figure::gb_per_s}, 9, true},
                                    {{"NVLink", &Figure::nvlink_wire_gb_per_s}, 9, true}};
  if (one_node) {
    table.insert(table.begin() + 4, {{"by", &Figure::by}, 12});
  } else {
    table.push_back({{"RDMA GB/s", &Figure::rdma_wire_gb_per_s}, 10, true});
  }
  return table;
}

std::string explanation(const NormalModeOptions& options) {
  std::string text;
  if (options.nodes > 1) {
    text += fmt::format("The ranks play {} nodes; {}.\n", options.nodes,
                        options.groups == 0 ? "a token's experts may be on all"
                                            : fmt::format("a token's experts are on {}", options.groups));
  }
  return text +
         "A round lasts as long as its slowest rank. median, min, max: by device events around the call, ranks "
         "aligned;\nwall: the same rounds by the host's clock; pipelined: median of rounds enqueued back to back;\n"
         "host: what a call between nodes keeps the host. GB/s: logical: of all rows that a rank receives; NVLink: of "
         "those from\nanother rank of the node; RDMA: of a row for each token and other node.\n";
}

int run_normal_mode_bench(const BenchKind& kind, NormalModeOptions options) {
  BenchRun run(kind, options);
  if (options.sms.empty()) options.sms = sms_to_try(options.tune, run.device);
  options.nccl = options.nccl && !options.quick;
  run.common.groups = options.groups;
  Report report(options.csv, run.speaks, table_of(options.nodes == 1));
  report.begin(run.text + explanation(options));
  run.measure([&](const RankTask& task) { NormalModeMeasurer(options, task, run.common, report).run(); });
  if (report.prints_text()) {
    fmt::print("{}{}", normal_mode_lines(options, options.tune, report.figures()),
               options.check ? "\nEvery checked result is exact.\n" : "");
  }
  return 0;
}

/// A command with the options that both have.
CLI::App* add_normal_mode(CLI::App& bench, Action& action, const BenchKind& kind, const char* help,
                          const std::shared_ptr<NormalModeOptions>& options) {
  CLI::App* command = bench.add_subcommand(kind.name, help);
  NormalModeOptions& o = *options;
  add_options(*command, kind, o);
  add_number(*command, "--sms", o.sms, 0, 1024,
             fmt::format("SMs to use, one or several numbers; 0 = the library's default (default {}; 0 on the "
                         "CPU)",
                         kSmsOfGpu))
      ->delimiter(',');
  command->add_flag("--tune", o.tune, "Try several numbers of SMs, and print a line for each as DeepEP's tests do");
  add_off_flag(*command, "--cached-only", o.uncached, "Leave out layout and dispatches that exchange counts");
  command->callback(
      [options, &action, &kind] { action = [options, &kind] { return run_normal_mode_bench(kind, *options); }; });
  return command;
}

void add_intranode(CLI::App& bench, Action& action) {
  const auto options = std::make_shared<NormalModeOptions>();
  CLI::App* command = add_normal_mode(
      bench, action, kIntranode,
      "Dispatch and combine inside one node: a thread for every GPU, or a process when started by mpirun", options);
  add_off_flag(*command, "--no-peers", options->nccl, "Leave out NCCL");
}

void add_internode(CLI::App& bench, Action& action) {
  const auto options = std::make_shared<NormalModeOptions>();
  options->nodes = 2;
  options->nccl = false;
  CLI::App* command = add_normal_mode(bench, action, kInternode,
                                      "Dispatch and combine between nodes, played by ranks of this host: a thread for "
                                      "every GPU, or a process when started by mpirun",
                                      options);
  add_number(*command, "--nodes", options->nodes, 2, kMostRanks,
             "Nodes that the ranks play; they reach other nodes by RDMA")
      ->capture_default_str();
  add_number(*command, "--groups,--num-topk-groups", options->groups, 0, kMostRanks,
             "Nodes that a token's experts are on; 0 = any")
      ->capture_default_str();
}

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(1);
  add_intranode(*bench, action);
  add_internode(*bench, action);
  add_bench_low_latency(*bench, action);
  add_bench_selftest(*bench, action);
  bench->callback([bench, &action] {  // behind that of the chosen benchmark
    const CLI::Option* option = bench->get_subcommands().front()->get_option_no_throw("--spawn");
    if (option == nullptr || option->count() == 0) return;
    action = [ranks = option->as<int>()] { return run_as_processes(ranks); };
  });
}

}  // namespace deep_ep::tools
