// `deep_ep bench intranode`: how long dispatch and combine take, and other means for the same bytes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "tools/bench/commands.hpp"
#include "tools/bench/intranode.hpp"
#include "tools/commands.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

constexpr BenchKind kIntranode = {
    .name = "intranode",
    .gpu = {.tokens = 4096, .hidden = 7168, .experts = 256, .rounds = 50, .warmup = 10},
    .cpu = {.tokens = 128, .hidden = 2048, .experts = 256, .rounds = 30, .warmup = 2},
    .limits = {.fewest_tokens = 0, .most_tokens = 1 << 20, .hidden_multiple = 16, .most_experts = 65536},
    .dtype_help = "Dispatched rows: fp8 (with a scale for every 128 channels), bf16 or both",
};
constexpr int kSmsOfGpu = 24;

nlohmann::json to_json(const Measurement& m) {
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

constexpr const char* kIntranodeLine = "{:>7} {:<23}{:<6}{:<12}{:<15}{:>5}{:>11}{:>10}{:>10}{:>11}{:>11}{:>10}{:>10}\n";

void print_head() {
  fmt::print(
      "A round lasts as long as its slowest rank. median, min, max: by device events around the call, ranks "
      "aligned;\n");
  fmt::print("wall: the same rounds by the host's clock; pipelined: median of rounds enqueued back to back.\n");
  fmt::print("logical: bytes of all rows a rank receives; NVLink: without those from itself.\n\n");
  fmt::print(kIntranodeLine, "tokens", "operation", "dtype", "mode", "by", "SMs", "median us", "min", "max", "wall us",
             "pipelined", "logical", "NVLink");
  fmt::print(kIntranodeLine, "", "", "", "", "", "", "", "", "", "", "us", "GB/s", "GB/s");
}

void print_line(const Measurement& m) {
  clear_progress();
  fmt::print(kIntranodeLine, m.tokens, m.operation, m.dtype, m.mode, m.transport,
             m.sms > 0 ? fmt::format("{}", m.sms) : "-", show_microseconds(m.timing.median),
             show_microseconds(m.timing.fastest), show_microseconds(m.timing.slowest), show_microseconds(m.timing.wall),
             show_microseconds(m.timing.back_to_back), show_rate(m.logical_gb_per_s()), show_rate(m.wire_gb_per_s()));
  std::fflush(stdout);
}

int run_intranode_bench(IntranodeOptions options) {
  const World world = make_world(options.ranks, options.device);
  const Device::Kind device = choose_device(options.device, world.separate_processes() ? 1 : world.size);
  complete(kIntranode, options, device, world.size);
  if (options.sms.empty()) options.sms = {device == Device::Kind::cuda ? kSmsOfGpu : 0};
  const bool prints_text = world.first_rank == 0 && !options.json;
  if (prints_text) {
    print_setting(options, world, device);
    print_head();
  }
  print_measurements<Measurement>(options, world, setting_json(kIntranode, options, world, device), print_line, to_json,
                                  [&](const auto& report) { run_intranode(options, world, device, report); });
  if (prints_text && options.check) fmt::print("\nEvery checked result is exact.\n");
  return 0;
}

void add_intranode(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "intranode", "Dispatch and combine inside one node: a thread for every GPU, or a process when started by mpirun");
  auto options = std::make_shared<IntranodeOptions>();
  IntranodeOptions& o = *options;
  add_options(*command, kIntranode, o);
  command
      ->add_option("--sms", o.sms,
                   fmt::format("SMs to use, one or several numbers; 0 = the library's default (default {}; 0 on the "
                               "CPU)",
                               kSmsOfGpu))
      ->delimiter(',')
      ->check(CLI::Range(0, 1024));
  command->add_option("--warps", o.warps, "Warps of a block, one or several numbers; 0 = the library's default")
      ->check(CLI::Range(0, 16));
  command->add_option("--window-mib", o.window_mib, "MiB of the buffer's window; 0 = the library's default")
      ->check(CLI::Range(0, 65536));
  command->add_option("--mode", o.mode, "Combine: pull, push or both")
      ->check(CLI::IsMember({"pull", "push", "both"}))
      ->capture_default_str();
  command->add_flag("!--no-peers", o.peers, "Leave out NCCL and the copy engines");
  command->add_flag("!--cached-only", o.uncached, "Leave out layout and dispatches that exchange counts");
  command->callback([options, &action] { action = [options] { return run_intranode_bench(*options); }; });
}

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(1);
  add_intranode(*bench, action);
  add_bench_low_latency(*bench, action);
}

}  // namespace deep_ep::tools
