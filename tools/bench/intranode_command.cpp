// `deep_ep bench intranode`: how long dispatch and combine take, and others for the same bytes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/intranode.hpp"
#include "tools/commands.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

struct BenchOptions {
  IntranodeOptions intranode;
  std::string device = "auto";
  bool json = false;
};

/// Sizes that suit the device, where the user gave none.
void complete(IntranodeOptions& options, Device::Kind device) {
  const bool gpu = device == Device::Kind::cuda;
  if (options.hidden == 0) options.hidden = gpu ? 7168 : 2048;
  if (options.tokens.empty()) options.tokens = {gpu ? 4096 : 128};
  if (options.sms.empty()) options.sms = {gpu ? 24 : 0};
  if (options.rounds.count == 0) options.rounds.count = gpu ? 50 : 30;
  if (options.rounds.warmup < 0) options.rounds.warmup = gpu ? 10 : 2;
}

void check(const IntranodeOptions& options, int ranks) {
  check_workload(ranks, options.topk, options.experts);
  if (options.hidden % 16 != 0) {
    throw InvalidArgument(fmt::format("--hidden {}: 8-bit rows need a multiple of 16", options.hidden));
  }
}

nlohmann::json to_json(const Measurement& m) {
  nlohmann::json json = {
      {"operation", m.operation},
      {"dtype", m.dtype},
      {"mode", m.mode},
      {"transport", m.transport},
      {"tokens", m.tokens},
      {"sms", nullptr},
      {"median_us", m.timing.median * 1e6},
      {"fastest_us", m.timing.fastest * 1e6},
      {"slowest_us", m.timing.slowest * 1e6},
      {"wall_us", m.timing.wall * 1e6},
      {"back_to_back_us", m.timing.back_to_back * 1e6},
      {"logical_bytes", m.logical_bytes},
      {"wire_bytes", m.wire_bytes},
      {"logical_gb_per_s", m.logical_gb_per_s()},
      {"wire_gb_per_s", m.wire_gb_per_s()},
  };
  if (m.sms >= 0) json["sms"] = m.sms;
  return json;
}

void print_head(const IntranodeOptions& options, const World& world, Device::Kind device) {
  fmt::print("{} ranks ({}) on {}; hidden {}, top-{} of {} experts, uniform routing; {} rounds after {} to warm up\n",
             world.size, world.kind, device == Device::Kind::cuda ? "a GPU each" : "the CPU (not a measure of speed)",
             options.hidden, options.topk, options.experts, options.rounds.count, options.rounds.warmup);
  fmt::print(
      "A round lasts as long as its slowest rank. median, min, max: by device events around the call, ranks "
      "aligned;\n");
  fmt::print("wall: the same rounds by the host's clock; pipelined: median of rounds enqueued back to back.\n");
  fmt::print("logical: bytes of all rows a rank receives; NVLink: without those from itself.\n\n");
  fmt::print("{:>7} {:<23}{:<6}{:<12}{:<15}{:>5}{:>11}{:>10}{:>10}{:>11}{:>11}{:>10}{:>10}\n", "tokens", "operation",
             "dtype", "mode", "by", "SMs", "median us", "min", "max", "wall us", "pipelined", "logical", "NVLink");
  fmt::print("{:>7} {:<23}{:<6}{:<12}{:<15}{:>5}{:>11}{:>10}{:>10}{:>11}{:>11}{:>10}{:>10}\n", "", "", "", "", "", "",
             "", "", "", "", "us", "GB/s", "GB/s");
}

void print_line(const Measurement& m) {
  const auto us = [](double seconds) { return fmt::format("{:.1f}", seconds * 1e6); };
  const auto rate = [](double gb_per_s) { return gb_per_s > 0 ? fmt::format("{:.4g}", gb_per_s) : std::string("-"); };
  clear_progress();
  fmt::print("{:>7} {:<23}{:<6}{:<12}{:<15}{:>5}{:>11}{:>10}{:>10}{:>11}{:>11}{:>10}{:>10}\n", m.tokens, m.operation,
             m.dtype, m.mode, m.transport, m.sms > 0 ? fmt::format("{}", m.sms) : "-", us(m.timing.median),
             us(m.timing.fastest), us(m.timing.slowest), us(m.timing.wall), us(m.timing.back_to_back),
             rate(m.logical_gb_per_s()), rate(m.wire_gb_per_s()));
  std::fflush(stdout);
}

int run_intranode_command(BenchOptions options) {
  World world = make_world(options.intranode.ranks, options.device);
  const Device::Kind device = choose_device(options.device, world.separate_processes() ? 1 : world.size);
  complete(options.intranode, device);
  check(options.intranode, world.size);
  const bool speaks = world.first_rank == 0;
  if (speaks && !options.json) print_head(options.intranode, world, device);

  nlohmann::json measurements = nlohmann::json::array();
  run_intranode(options.intranode, world, device, [&](const Measurement& measurement) {
    options.json ? measurements.push_back(to_json(measurement)) : print_line(measurement);
  });
  if (speaks && options.json) {
    const nlohmann::json json = {{"benchmark", "intranode"},
                                 {"device", device == Device::Kind::cuda ? "cuda" : "cpu"},
                                 {"ranks", world.size},
                                 {"ranks_are", world.kind},
                                 {"hidden", options.intranode.hidden},
                                 {"topk", options.intranode.topk},
                                 {"experts", options.intranode.experts},
                                 {"rounds", options.intranode.rounds.count},
                                 {"warmup", options.intranode.rounds.warmup},
                                 {"checked", options.intranode.check},
                                 {"measurements", measurements}};
    fmt::print("{}\n", json.dump(2));
  }
  if (speaks && !options.json && options.intranode.check) fmt::print("\nEvery checked result is exact.\n");
  return 0;
}

void add_intranode(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "intranode", "Dispatch and combine inside one node: a thread for every GPU, or a process when started by mpirun");
  auto options = std::make_shared<BenchOptions>();
  IntranodeOptions& o = options->intranode;
  o.rounds = {-1, 0};
  command->add_option("--ranks", o.ranks, "Ranks (default: one for every GPU, 4 on the CPU)")->check(CLI::Range(1, 64));
  command->add_option("--device", options->device, "auto: GPUs when there is one for every rank")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--tokens", o.tokens, "Tokens of each rank, one or several numbers (default 4096; 128 on the CPU)")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20));
  command->add_option("--hidden", o.hidden, "Channels of a token (default 7168; 2048 on the CPU)")
      ->check(CLI::Range(16, 65536));
  command->add_option("--topk", o.topk, "Experts of each token")->check(CLI::Range(1, 32))->capture_default_str();
  command->add_option("--experts", o.experts, "Experts of all ranks")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command
      ->add_option("--sms", o.sms,
                   "SMs to use, one or several numbers; 0 = the library's default (default 24; 0 on the CPU)")
      ->delimiter(',')
      ->check(CLI::Range(0, 1024));
  command->add_option("--warps", o.warps, "Warps of a block, one or several numbers; 0 = the library's default")
      ->check(CLI::Range(0, 16));
  command->add_option("--window-mib", o.window_mib, "MiB of the buffer's window; 0 = the library's default")
      ->check(CLI::Range(0, 65536));
  command->add_option("--dtype", o.dtype, "Dispatched rows: fp8 (with a scale for every 128 channels), bf16 or both")
      ->check(CLI::IsMember({"fp8", "bf16", "both"}))
      ->capture_default_str();
  command->add_option("--mode", o.mode, "Combine: pull, push or both")
      ->check(CLI::IsMember({"pull", "push", "both"}))
      ->capture_default_str();
  command->add_option("--iterations", o.rounds.count, "Timed rounds (default 50; 30 on the CPU)")
      ->check(CLI::Range(1, 100000));
  command->add_option("--warmup", o.rounds.warmup, "Rounds before them (default 10; 2 on the CPU)")
      ->check(CLI::Range(0, 100000));
  command->add_flag("!--no-peers", o.peers, "Leave out NCCL and the copy engines");
  command->add_flag("!--cached-only", o.uncached, "Leave out layout and dispatches that exchange counts");
  command->add_flag("--check", o.check, "Compare the last round of everything with what it must be");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return run_intranode_command(*options); }; });
}

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(1);
  add_intranode(*bench, action);
  add_bench_low_latency(*bench, action);
}

}  // namespace deep_ep::tools
