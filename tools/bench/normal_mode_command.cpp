// `deep_ep bench intranode`: how long dispatch and combine take, and other means for the same bytes. `deep_ep bench
// internode`: the same for ranks of this host that play several nodes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/normal_mode.hpp"
#include "tools/bench/upstream_lines.hpp"
#include "tools/commands.hpp"
#include "tools/common/child.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"
#include "tools/launch/launch.hpp"

namespace deep_ep::tools {
namespace {

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

nlohmann::json intranode_json(const Measurement& m) {
  nlohmann::json json = timing_json(m.timing);
  json.update({{"operation", m.operation},
               {"dtype", m.dtype},
               {"mode", m.mode},
               {"transport", m.transport},
               {"tokens", m.tokens},
               {"sms", nullptr},
               {"wall_us", m.timing.wall * 1e6},
               {"logical_bytes", m.logical_bytes},
               {"wire_bytes", m.wire_bytes},
               {"logical_gb_per_s", m.logical_gb_per_s()},
               {"wire_gb_per_s", m.wire_gb_per_s()}});
  if (m.sms >= 0) json["sms"] = m.sms;
  return json;
}

nlohmann::json internode_json(const Measurement& m) {
  nlohmann::json json = intranode_json(m);
  json.update({{"host_us", nullptr}, {"rdma_bytes", m.rdma_bytes}, {"rdma_gb_per_s", m.rdma_gb_per_s()}});
  if (m.host > 0) json["host_us"] = m.host * 1e6;
  return json;
}

constexpr const char* kIntranodeLine =
    "{:>7} {:<23}{:<6}{:<12}{:<15} {:>4} {:>10} {:>9} {:>9} {:>10} {:>10} {:>9} {:>9}\n";

void explain_times() {
  fmt::print(
      "A round lasts as long as its slowest rank. median, min, max: by device events around the call, ranks "
      "aligned;\n");
  fmt::print("wall: the same rounds by the host's clock; pipelined: median of rounds enqueued back to back.\n");
}

void print_intranode_head() {
  explain_times();
  fmt::print("logical: bytes of all rows a rank receives; NVLink: without those from itself.\n\n");
  fmt::print(kIntranodeLine, "tokens", "operation", "dtype", "mode", "by", "SMs", "median us", "min", "max", "wall us",
             "pipelined", "logical", "NVLink");
  fmt::print(kIntranodeLine, "", "", "", "", "", "", "", "", "", "", "us", "GB/s", "GB/s");
}

std::string show_sms(const Measurement& m) { return m.sms > 0 ? fmt::format("{}", m.sms) : "-"; }

void print_intranode_line(const Measurement& m) {
  clear_progress();
  fmt::print(kIntranodeLine, m.tokens, m.operation, m.dtype, m.mode, m.transport, show_sms(m),
             show_microseconds(m.timing.median), show_microseconds(m.timing.fastest),
             show_microseconds(m.timing.slowest), show_microseconds(m.timing.wall),
             show_microseconds(m.timing.back_to_back), show_rate(m.logical_gb_per_s()), show_rate(m.wire_gb_per_s()));
  std::fflush(stdout);
}

constexpr const char* kInternodeLine =
    "{:>7} {:<23}{:<6}{:<9} {:>4} {:>10} {:>9} {:>9} {:>10} {:>10} {:>8} {:>9} {:>9} {:>9}\n";

void print_internode_head(const NormalModeOptions& options) {
  fmt::print("The ranks play {} nodes; {}.\n", options.nodes,
             options.groups == 0 ? "a token's experts may be on all"
                                 : fmt::format("a token's experts are on {}", options.groups));
  explain_times();
  fmt::print("host: what a call that does not wait for the device keeps the host.\n");
  fmt::print(
      "logical: bytes of all rows a rank receives; NVLink: those from another rank of the node; RDMA: a row for each "
      "token\nand other node.\n\n");
  fmt::print(kInternodeLine, "tokens", "operation", "dtype", "mode", "SMs", "median us", "min", "max", "wall us",
             "pipelined", "host us", "logical", "NVLink", "RDMA");
  fmt::print(kInternodeLine, "", "", "", "", "", "", "", "", "", "us", "", "GB/s", "GB/s", "GB/s");
}

void print_internode_line(const Measurement& m) {
  clear_progress();
  fmt::print(kInternodeLine, m.tokens, m.operation, m.dtype, m.mode, show_sms(m), show_microseconds(m.timing.median),
             show_microseconds(m.timing.fastest), show_microseconds(m.timing.slowest), show_microseconds(m.timing.wall),
             show_microseconds(m.timing.back_to_back), m.host > 0 ? show_microseconds(m.host) : "-",
             show_rate(m.logical_gb_per_s()), show_rate(m.wire_gb_per_s()), show_rate(m.rdma_gb_per_s()));
  std::fflush(stdout);
}

void fill_figure(Figure& figure, const Measurement& m) {
  figure.operation = m.operation;
  figure.dtype = m.dtype;
  figure.mode = m.mode;
  figure.by = m.transport;
  figure.tokens = m.tokens;
  if (m.sms > 0) figure.sms = m.sms;
  set_times(figure, m.timing);
  const auto set = [&](Figure::Number& rate, double bytes) {
    if (bytes > 0 && m.timing.median > 0) rate = bytes / m.timing.median * 1e-9;
  };
  set(figure.gb_per_s, m.logical_bytes);
  set(figure.nvlink_wire_gb_per_s, m.wire_bytes);
  if (m.host > 0) figure.host_us = m.host * 1e6;
  if (*figure.nodes == 1) return;
  set(figure.rdma_gb_per_s, m.to_nodes_bytes);
  set(figure.rdma_wire_gb_per_s, m.rdma_bytes);
}

std::vector<int> sms_to_try(bool tune, Device::Kind device) {
  if (!tune) return {device == Device::Kind::cuda ? kSmsOfGpu : 0};
  return device == Device::Kind::cuda ? std::vector<int>{4, 8, 12, 16, 20, 24, 32} : std::vector<int>{1, 2, 4};
}

int run_normal_mode_bench(const BenchKind& kind, NormalModeOptions options) {
  const World world = make_world(options, options.nodes);
  const Device::Kind device = choose_device(options.device, world.local_ranks());
  complete(kind, options, device, world.size);
  check_nodes(world.size, options.topk, options.experts, options.nodes, options.groups);
  if (options.sms.empty()) options.sms = sms_to_try(options.tune, device);
  options.peers = options.peers && !options.quick;
  const bool prints_text = world.first_rank == 0 && options.output.text();
  const bool one_node = options.nodes == 1;
  nlohmann::json setting = setting_json(kind, options, world, device);
  if (!one_node) setting.update({{"nodes", options.nodes}, {"groups", options.groups}});
  Figure figure = setting_figure(kind, options, world, device);
  figure.nodes = options.nodes;
  figure.groups = options.groups;
  Measurements<Measurement> measurements(options, world, std::move(setting), std::move(figure),
                                         {.line = one_node ? print_intranode_line : print_internode_line,
                                          .json = one_node ? intranode_json : internode_json,
                                          .fill = fill_figure});
  if (prints_text) {
    print_setting(options, world, device);
    one_node ? print_intranode_head() : print_internode_head(options);
  }
  NormalModeLines lines(options, options.tune);
  run_normal_mode(options, world, device, [&](const Measurement& measurement) {
    measurements.add(measurement);
    lines.add(measurement);
  });
  if (prints_text) {
    lines.print();
    if (options.check) fmt::print("\nEvery checked result is exact.\n");
  }
  return measurements.finish();
}

/// A command with the options that both have.
CLI::App* add_normal_mode(CLI::App& bench, Action& action, const BenchKind& kind, const char* help,
                          const std::shared_ptr<NormalModeOptions>& options) {
  CLI::App* command = bench.add_subcommand(kind.name, help);
  NormalModeOptions& o = *options;
  add_options(*command, kind, o);
  command
      ->add_option("--sms", o.sms,
                   fmt::format("SMs to use, one or several numbers; 0 = the library's default (default {}; 0 on the "
                               "CPU)",
                               kSmsOfGpu))
      ->delimiter(',')
      ->check(CLI::Range(0, 1024));
  command->add_flag("--tune", o.tune, "Try several numbers of SMs, and print a line for each as DeepEP's tests do");
  command->add_option("--warps", o.warps, "Warps of a block, one or several numbers; 0 = the library's default")
      ->check(CLI::Range(0, 16));
  command->add_option("--window-mib", o.window_mib, "MiB of the buffer's window; 0 = the library's default")
      ->check(CLI::Range(0, 65536));
  command
      ->add_option(
          "--mode", o.mode,
          o.nodes == 1 ? "Combine: pull, push or both" : "Combine: rows in the heap (pull), elsewhere (push), or both")
      ->check(CLI::IsMember({"pull", "push", "both"}))
      ->capture_default_str();
  command->add_flag("!--cached-only", o.uncached, "Leave out layout and dispatches that exchange counts");
  command->callback(
      [options, &action, &kind] { action = [options, &kind] { return run_normal_mode_bench(kind, *options); }; });
  return command;
}

/// --spawn N: this command again, as N processes.
int spawn(int count) {
  if (World::several_processes()) {
    throw InvalidArgument(fmt::format("--spawn {}: this process is one of several already; leave it out", count));
  }
  std::vector<std::string> words = {own_program()};
  std::ifstream file("/proc/self/cmdline");
  std::string word;
  std::getline(file, word, '\0');
  while (std::getline(file, word, '\0')) {
    if (word == "--spawn") {
      std::getline(file, word, '\0');
    } else if (!word.starts_with("--spawn=")) {
      words.push_back(word);
    }
  }
  return run_rank_processes(words, Place{}, count, false);
}

void add_intranode(CLI::App& bench, Action& action) {
  const auto options = std::make_shared<NormalModeOptions>();
  add_normal_mode(bench, action, kIntranode,
                  "Dispatch and combine inside one node: a thread for every GPU, or a process when started by mpirun",
                  options)
      ->add_flag("!--no-peers", options->peers, "Leave out NCCL and the copy engines");
}

void add_internode(CLI::App& bench, Action& action) {
  const auto options = std::make_shared<NormalModeOptions>();
  options->nodes = 2;
  options->peers = false;
  CLI::App* command = add_normal_mode(bench, action, kInternode,
                                      "Dispatch and combine between nodes, played by ranks of this host: a thread for "
                                      "every GPU, or a process when started by mpirun",
                                      options);
  command->add_option("--nodes", options->nodes, "Nodes that the ranks play; they reach other nodes by RDMA")
      ->check(CLI::Range(2, kMostRanks))
      ->capture_default_str();
  command->add_option("--groups,--num-topk-groups", options->groups, "Nodes that a token's experts are on; 0 = any")
      ->check(CLI::Range(0, kMostRanks))
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
  add_bench_wire(*bench, action);
  add_bench_sweep(*bench, action);
  add_bench_nccl_parse(*bench, action);
  add_bench_plot(*bench, action);
  bench->callback([bench, &action] {  // behind that of the chosen benchmark
    const CLI::Option* option = bench->get_subcommands().front()->get_option_no_throw("--spawn");
    if (option == nullptr || option->count() == 0) return;
    action = [count = option->as<int>()] { return spawn(count); };
  });
}

}  // namespace deep_ep::tools
