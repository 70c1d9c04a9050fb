// `deep_ep bench low-latency`: how long the calls for decoding take.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "deep_ep/error.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/late_rank.hpp"
#include "tools/bench/low_latency.hpp"
#include "tools/bench/upstream_lines.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/json_output.hpp"
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
    .dtype_help = "Dispatched rows: fp8 (cast by the call), bf16 or both; fp8-token (one scale for each), nvfp4",
    .more_dtypes = true,
};

// A blank before each column, so that numbers that are longer than it stay apart.
constexpr const char* kLowLatencyLine = "{:>7} {:<17}{:<11}{:<12} {:>9} {:>8} {:>8} {:>10} {:>8} {:>10} {:>8}\n";

void print_head(const LowLatencyOptions& options, Device::Kind device) {
  if (options.nodes > 1) fmt::print("The ranks play {} nodes, and reach other nodes by RDMA.\n", options.nodes);
  fmt::print("Rows between nodes by rails: {}.\n", options.rails);
  if (!options.nvlink) fmt::print("No NVLink: the ranks reach each other by RDMA.\n");
  fmt::print("A round lasts as long as its slowest rank. median, min, max: by device events around {}.\n",
             device == Device::Kind::cuda ? "the call's kernels, behind a barrier of the GPUs" : "the call");
  fmt::print("pipelined: median of rounds enqueued back to back. host: what a call keeps the host.\n");
  if (options.late_us > 0) {
    fmt::print("send late, receive late: parts of the other ranks, while rank {} begins each send part {} us late.\n",
               options.late_rank, options.late_us);
  }
  fmt::print(
      "selected: bytes with a row for every selection, as DeepEP's test counts; NVLink: rows between ranks.\n\n");
  fmt::print(kLowLatencyLine, "tokens", "operation", "variant", "part", "median us", "min", "max", "pipelined",
             "host us", "selected", "NVLink");
  fmt::print(kLowLatencyLine, "", "", "", "", "", "", "", "us", "", "GB/s", "GB/s");
}

void print_low_latency_line(const Figure& m) {
  clear_progress();
  fmt::print(kLowLatencyLine, *m.tokens, m.operation, m.operation == "combine" ? m.mode : m.dtype, m.part,
             show_microseconds(m.median_us), show_microseconds(m.min_us), show_microseconds(m.max_us),
             show_microseconds(m.pipelined_us), show_microseconds(m.host_us), show_rate(m.gb_per_s),
             show_rate(m.nvlink_wire_gb_per_s));
  std::fflush(stdout);
}

/// Fills in the rank that comes late. Throws InvalidArgument where that makes no sense.
void complete_lateness(LowLatencyOptions& options, int ranks) {
  if (options.late_rank >= ranks) {
    throw InvalidArgument(fmt::format("--late-rank is {}, allowed: 0 to {}", options.late_rank, ranks - 1));
  }
  const bool times = !options.who_is_late;
  if (times && options.late_us == 0 && options.late_rank >= 0) {
    throw InvalidArgument("--late-rank needs --late: how late it is");
  }
  if (times && options.late_us > 0 && !options.hooks) {
    throw InvalidArgument("--late measures send and receive parts, which --no-hooks leaves out");
  }
  if (times && options.late_us > 0 && ranks < 2) {
    throw InvalidArgument("--late needs 2 ranks or more, there is 1: nobody else would be measured");
  }
  if (options.late_rank < 0) options.late_rank = ranks - 1;
}

/// Throws InvalidArgument where somebody asks for what times alone have, and for no times.
void refuse_options_of_times(const CLI::App& command) {
  const auto given = [&](const char* option) { return command.count(option) != 0; };
  for (const char* const instead : {"--who-is-late", "--trace"}) {
    for (const char* const of_times : {"--check", "--csv", "--compare", "--fail-below", "--dtype", "--arrivals",
                                       "--combine-fp8", "--no-hooks", "--no-graphs"}) {
      if (!given(instead) || !given(of_times)) continue;
      throw InvalidArgument(
          fmt::format("{} measures no times, and {} says how to: leave out one of them", instead, of_times));
    }
  }
  if (given("--late-threshold") && !given("--who-is-late") && !given("--trace")) {
    throw InvalidArgument("--late-threshold needs --who-is-late or --trace: it says who is late there");
  }
}

/// --who-is-late, --trace.
int run_late_rank(const LowLatencyOptions& options, const World& world, Device::Kind device, bool prints_text) {
  if (prints_text) {
    print_setting(options, world, device);
    fmt::print(
        "What a rank waits for each source, on average over {} rounds: the median of the other ranks.\n"
        "longest: one wait in one call, and of which rank.\n\n",
        options.rounds.count);
  }
  nlohmann::json document = setting_json(kLowLatency, options, world, device);
  find_late_rank(options, world, device, [&](const LateRankReport& report) {
    if (prints_text) print_late_rank(report);
    document["who_is_late"].push_back(late_rank_json(report));
  });
  if (world.first_rank == 0 && options.output.json) print_json(document);
  return 0;
}

int run_low_latency_bench(LowLatencyOptions options) {
  int nodes = std::max(1, options.nodes);
  const World world = make_world(options, nodes);
  if (options.nodes != 0) options.nodes = nodes;
  const Device::Kind device = choose_device(options.device, world.local_ranks());
  complete(kLowLatency, options, device, world.size);
  check_nodes(world.size, options.topk, options.experts, nodes, 0);
  complete_lateness(options, world.size);
  const bool prints_text = world.first_rank == 0 && options.output.text();
  if (options.who_is_late) return run_late_rank(options, world, device, prints_text);
  nlohmann::json setting = setting_json(kLowLatency, options, world, device);
  setting.update({{"nodes", options.nodes}, {"nvlink", options.nvlink}, {"rails", options.rails}});
  if (options.late_us > 0) setting.update({{"late_us", options.late_us}, {"late_rank", options.late_rank}});
  Figure common = setting_figure(kLowLatency, options, world, device);
  common.nodes = nodes;
  Report report(options.output, world.first_rank == 0, std::move(setting));
  if (prints_text) {
    print_setting(options, world, device);
    print_head(options, device);
  }
  LowLatencyLines lines(options, world.size);
  run_low_latency(options, world, device, common, [&](const Figure& figure) {
    if (prints_text) print_low_latency_line(figure);
    report.add(figure);
    lines.add(figure);
  });
  if (prints_text) {
    lines.print();
    if (options.check) fmt::print("\nEvery checked result is right.\n");
  }
  return report.finish();
}

}  // namespace

void add_bench_low_latency(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "low-latency", "Dispatch and combine for decoding: a thread for every GPU, or a process when started by mpirun");
  auto options = std::make_shared<LowLatencyOptions>();
  LowLatencyOptions& o = *options;
  add_options(*command, kLowLatency, o);
  command->add_option("--nodes", o.nodes, "Nodes that the ranks play; they reach other nodes by RDMA")
      ->check(CLI::Range(1, kMostRanks));
  add_off_flag(*command, "--no-nvlink,--disable-nvlink", o.nvlink, "Reach all ranks by RDMA");
  command
      ->add_option("--rails", o.rails,
                   "Send rows once for each node, not for each rank: where it should pay, always, or never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  add_off_flag(*command, "--no-hooks", o.hooks, "Leave out send and receive parts by themselves");
  command
      ->add_option("--late", o.late_us,
                   "Also measure the parts of the other ranks while one begins each send part so many microseconds "
                   "late; with --who-is-late, each round")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--late-rank", o.late_rank, "Which rank is late [the last]")
      ->check(CLI::Range(0, kMostRanks - 1));
  add_off_flag(*command, "--no-graphs", o.graphs, "Leave out replays of CUDA graphs");
  command->add_flag("--who-is-late", o.who_is_late, "Instead of times: which rank the others wait for");
  command
      ->add_option("--late-threshold", o.late_threshold_us,
                   "--who-is-late: microseconds that the others must wait longer for a late rank than for the quickest "
                   "[50; on the CPU there is no verdict without it]")
      ->check(CLI::PositiveNumber);
  command->add_flag("--trace", o.trace,
                    "--who-is-late with each call in two parts; --json says when they end, for scripts/bench_plot.py");
  command->add_flag("--arrivals", o.arrivals, "Give dispatches arrival counters, a word for 64 rows");
  command->add_flag("--combine-fp8", o.combine_fp8, "Also measure combine with rows in FP8");
  command->callback([command, options, &action] {
    action = [command, options] {
      refuse_options_of_times(*command);
      options->who_is_late = options->who_is_late || options->trace;
      return run_low_latency_bench(*options);
    };
  });
}

}  // namespace deep_ep::tools
