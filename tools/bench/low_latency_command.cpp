// `deep_ep bench low-latency`: how long the calls for decoding take.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/low_latency.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

struct CommandOptions {
  LowLatencyOptions low_latency;
  std::string device = "auto";
  bool json = false;
};

/// Sizes that suit the device, where the user gave none.
void complete(LowLatencyOptions& options, Device::Kind device, int ranks) {
  const bool gpu = device == Device::Kind::cuda;
  if (options.hidden == 0) options.hidden = gpu ? 7168 : 1024;
  if (options.tokens.empty()) options.tokens = {gpu ? 128 : 16};
  if (options.experts == 0) options.experts = (288 + ranks - 1) / ranks * ranks;
  if (options.rounds.count == 0) options.rounds.count = gpu ? 100 : 10;
  if (options.rounds.warmup < 0) options.rounds.warmup = gpu ? 20 : 2;
}

void check(const LowLatencyOptions& options, int ranks) {
  check_workload(ranks, options.topk, options.experts);
  if (options.nodes != 0 && ranks % options.nodes != 0) {
    throw InvalidArgument(fmt::format("--nodes {}: must divide the {} ranks", options.nodes, ranks));
  }
  if (options.hidden % 128 != 0) {
    throw InvalidArgument(fmt::format("--hidden {}: must be a multiple of 128", options.hidden));
  }
}

nlohmann::json to_json(const LowLatencyMeasurement& m) {
  return {
      {"operation", m.operation},
      {"variant", m.variant},
      {"part", m.part},
      {"tokens", m.tokens},
      {"median_us", m.timing.median * 1e6},
      {"fastest_us", m.timing.fastest * 1e6},
      {"slowest_us", m.timing.slowest * 1e6},
      {"back_to_back_us", m.timing.back_to_back * 1e6},
      {"host_us", m.host * 1e6},
      {"selected_bytes", m.selected_bytes},
      {"wire_bytes", m.wire_bytes},
      {"selected_gb_per_s", m.selected_gb_per_s()},
      {"wire_gb_per_s", m.wire_gb_per_s()},
  };
}

constexpr const char* kLine = "{:>7} {:<17}{:<11}{:<9}{:>10}{:>9}{:>9}{:>11}{:>9}{:>11}{:>9}\n";

void print_head(const LowLatencyOptions& options, const World& world, Device::Kind device) {
  const bool gpu = device == Device::Kind::cuda;
  fmt::print("{} ranks ({}) on {}; hidden {}, top-{} of {} experts, uniform routing; {} rounds after {} to warm up\n",
             world.size, world.kind, gpu ? "a GPU each" : "the CPU (not a measure of speed)", options.hidden,
             options.topk, options.experts, options.rounds.count, options.rounds.warmup);
  if (options.nodes > 1) fmt::print("The ranks play {} nodes, and reach other nodes by RDMA.\n", options.nodes);
  fmt::print("Rows between nodes by rails: {}.\n", options.rails);
  if (!options.nvlink) fmt::print("No NVLink: the ranks reach each other by RDMA.\n");
  fmt::print("A round lasts as long as its slowest rank. median, min, max: by device events around {}.\n",
             gpu ? "the call's kernels, behind a barrier of the GPUs" : "the call");
  fmt::print("pipelined: median of rounds enqueued back to back. host: what a call keeps the host.\n");
  fmt::print(
      "selected: bytes with a row for every selection, as DeepEP's test counts; NVLink: rows between ranks.\n\n");
  fmt::print(kLine, "tokens", "operation", "variant", "part", "median us", "min", "max", "pipelined", "host us",
             "selected", "NVLink");
  fmt::print(kLine, "", "", "", "", "", "", "", "us", "", "GB/s", "GB/s");
}

void print_line(const LowLatencyMeasurement& m) {
  const auto us = [](double seconds) { return seconds > 0 ? fmt::format("{:.1f}", seconds * 1e6) : std::string("-"); };
  const auto rate = [](double gb_per_s) { return gb_per_s > 0 ? fmt::format("{:.4g}", gb_per_s) : std::string("-"); };
  const bool part = m.part == "send" || m.part == "receive";
  clear_progress();
  fmt::print(kLine, m.tokens, m.operation, m.variant, m.part, us(m.timing.median), us(m.timing.fastest),
             us(m.timing.slowest), us(m.timing.back_to_back), us(m.host), part ? "-" : rate(m.selected_gb_per_s()),
             part ? "-" : rate(m.wire_gb_per_s()));
  if (m.operation == "dispatch+combine" && m.part == "whole") {
    fmt::print("Dispatch + combine bandwidth: {:.2f} GB/s, avg_t={:.2f} us\n", m.selected_gb_per_s(),
               m.seconds() * 1e6);
  }
  std::fflush(stdout);
}

int run_command(CommandOptions options) {
  World world = make_world(options.low_latency.ranks, options.device);
  const Device::Kind device = choose_device(options.device, world.separate_processes() ? 1 : world.size);
  LowLatencyOptions& o = options.low_latency;
  complete(o, device, world.size);
  check(o, world.size);
  const bool speaks = world.first_rank == 0;
  if (speaks && !options.json) print_head(o, world, device);

  nlohmann::json measurements = nlohmann::json::array();
  run_low_latency(o, world, device, [&](const LowLatencyMeasurement& measurement) {
    options.json ? measurements.push_back(to_json(measurement)) : print_line(measurement);
  });
  if (speaks && options.json) {
    const nlohmann::json json = {{"benchmark", "low-latency"},
                                 {"device", device == Device::Kind::cuda ? "cuda" : "cpu"},
                                 {"ranks", world.size},
                                 {"ranks_are", world.kind},
                                 {"nodes", o.nodes},
                                 {"nvlink", o.nvlink},
                                 {"rails", o.rails},
                                 {"hidden", o.hidden},
                                 {"topk", o.topk},
                                 {"experts", o.experts},
                                 {"rounds", o.rounds.count},
                                 {"warmup", o.rounds.warmup},
                                 {"checked", o.check},
                                 {"measurements", measurements}};
    fmt::print("{}\n", json.dump(2));
  }
  if (speaks && !options.json && o.check) fmt::print("\nEvery checked result is right.\n");
  return 0;
}

}  // namespace

void add_bench_low_latency(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "low-latency", "Dispatch and combine for decoding: a thread for every GPU, or a process when started by mpirun");
  auto options = std::make_shared<CommandOptions>();
  LowLatencyOptions& o = options->low_latency;
  o.rounds = {-1, 0};
  command->add_option("--ranks", o.ranks, "Ranks (default: one for every GPU, 4 on the CPU)")->check(CLI::Range(1, 64));
  command->add_option("--device", options->device, "auto: GPUs when there is one for every rank")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--tokens", o.tokens, "Tokens of each rank, one or several numbers (default 128; 16 on the CPU)")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{8192}));
  command->add_option("--hidden", o.hidden, "Channels of a token (default 7168; 1024 on the CPU)")
      ->check(CLI::Range(128, 65536));
  command->add_option("--topk", o.topk, "Experts of each token")->check(CLI::Range(1, 32))->capture_default_str();
  command->add_option("--experts", o.experts, "Experts of all ranks (default 288)")->check(CLI::Range(1, 65535));
  command->add_option("--dtype", o.dtype, "Dispatched rows: fp8 (cast by the call), bf16 or both")
      ->check(CLI::IsMember({"fp8", "bf16", "both"}))
      ->capture_default_str();
  command->add_option("--iterations", o.rounds.count, "Timed rounds (default 100; 10 on the CPU)")
      ->check(CLI::Range(1, 100000));
  command->add_option("--warmup", o.rounds.warmup, "Rounds before them (default 20; 2 on the CPU)")
      ->check(CLI::Range(0, 100000));
  command->add_option("--nodes", o.nodes, "Nodes that the ranks play; they reach other nodes by RDMA")
      ->check(CLI::Range(1, 64));
  command->add_flag("!--no-nvlink", o.nvlink, "Reach all ranks by RDMA");
  command
      ->add_option("--rails", o.rails,
                   "Send rows once for each node, not for each rank: where it should pay, always, or never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  command->add_flag("!--no-hooks", o.hooks, "Leave out send and receive parts by themselves");
  command->add_flag("!--no-graphs", o.graphs, "Leave out replays of CUDA graphs");
  command->add_flag("--check", o.check, "Compare the last round of everything with what it must be");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return run_command(*options); }; });
}

}  // namespace deep_ep::tools
