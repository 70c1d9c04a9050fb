#include "tools/bench/options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "deep_ep/error.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/variables.hpp"

namespace deep_ep::tools {

void add_options(CLI::App& command, const BenchKind& kind, BenchOptions& options) {
  const BenchSizes& gpu = kind.gpu;
  const BenchSizes& cpu = kind.cpu;
  CLI::Option* ranks = add_ranks_option(command, options.ranks, "Ranks (default: one for every GPU, 4 on the CPU)");
  command.add_option("--num-processes", options.ranks_per_node, "Ranks of each node, instead of --ranks")
      ->check(CLI::Range(1, kMostRanks))
      ->excludes(ranks);
  command.add_option("--spawn", options.spawn, "Ranks of this host as processes that this one starts, not as threads")
      ->check(CLI::Range(1, kMostRanks))
      ->excludes(ranks);
  add_device_option(command, options.device);
  command
      .add_option("--tokens,--num-tokens", options.tokens,
                  fmt::format("Tokens of each rank, one or several numbers (default {}; {} on the CPU)", gpu.tokens,
                              cpu.tokens))
      ->delimiter(',')
      ->check(CLI::Range(kind.limits.fewest_tokens, kind.limits.most_tokens));
  command
      .add_option("--hidden", options.hidden,
                  fmt::format("Channels of a token (default {}; {} on the CPU)", gpu.hidden, cpu.hidden))
      ->check(CLI::Range(kind.limits.hidden_multiple, 65536));
  command.add_option("--topk,--num-topk", options.topk, "Experts of each token")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  command
      .add_option("--experts,--num-experts", options.experts,
                  fmt::format("Experts of all ranks (default {})", gpu.experts))
      ->check(CLI::Range(1, kind.limits.most_experts));
  std::vector<std::string> dtypes = {"fp8", "bf16", "both"};
  if (kind.more_dtypes) dtypes.insert(dtypes.end(), {"fp8-token", "nvfp4"});
  command.add_option("--dtype", options.dtype, kind.dtype_help)->check(CLI::IsMember(dtypes))->capture_default_str();
  command
      .add_option("--iterations", options.rounds.count,
                  fmt::format("Timed rounds (default {}; {} on the CPU)", gpu.rounds, cpu.rounds))
      ->check(CLI::Range(1, 100000));
  command
      .add_option("--warmup", options.rounds.warmup,
                  fmt::format("Rounds before them (default {}; {} on the CPU)", gpu.warmup, cpu.warmup))
      ->check(CLI::Range(0, 100000));
  command.add_flag("--check", options.check, "Compare the last round of everything with what it must be");
  command.add_flag("--quick", options.quick, "Small sizes, few rounds, and --check: does it work at all?");
  add_output_options(command, options.output);
}

World make_world(const BenchOptions& options, int& nodes) {
  check_environment();
  const int playing_nodes = options.ranks_per_node * nodes;
  World world = make_world(playing_nodes != 0 ? playing_nodes : options.ranks, options.ranks_per_node, options.device);
  if (world.nodes != 0) nodes = world.nodes;
  return world;
}

void complete(const BenchKind& kind, BenchOptions& options, Device::Kind device, int ranks) {
  const bool gpu = device == Device::Kind::cuda;
  const BenchSizes& sizes = options.quick ? (gpu ? kind.quick_gpu : kind.quick_cpu) : (gpu ? kind.gpu : kind.cpu);
  options.check = options.check || options.quick;
  if (options.tokens.empty()) options.tokens = {sizes.tokens};
  if (options.hidden == 0) options.hidden = sizes.hidden;
  if (options.experts == 0) options.experts = (sizes.experts + ranks - 1) / ranks * ranks;
  if (options.rounds.count == 0) options.rounds.count = sizes.rounds;
  if (options.rounds.warmup < 0) options.rounds.warmup = sizes.warmup;
  check_workload(ranks, options.topk, options.experts);
  if (options.hidden % kind.limits.hidden_multiple != 0) {
    throw InvalidArgument(
        fmt::format("--hidden {}: must be a multiple of {}", options.hidden, kind.limits.hidden_multiple));
  }
}

void print_setting(const BenchOptions& options, const World& world, Device::Kind device) {
  fmt::print("{} ranks ({}) on {}; hidden {}, top-{} of {} experts, uniform routing; {} rounds after {} to warm up\n",
             world.size, world.kind, device == Device::Kind::cuda ? "a GPU each" : "the CPU (not a measure of speed)",
             options.hidden, options.topk, options.experts, options.rounds.count, options.rounds.warmup);
}

nlohmann::json setting_json(const BenchKind& kind, const BenchOptions& options, const World& world,
                            Device::Kind device) {
  return {{"benchmark", kind.name},     {"device", name_of(device)},      {"ranks", world.size},
          {"ranks_are", world.kind},    {"hidden", options.hidden},       {"topk", options.topk},
          {"experts", options.experts}, {"rounds", options.rounds.count}, {"warmup", options.rounds.warmup},
          {"checked", options.check}};
}

Figure setting_figure(const BenchKind& kind, const BenchOptions& options, const World& world, Device::Kind device) {
  Figure figure;
  figure.benchmark = kind.name;
  figure.by = "deep_ep";
  figure.device = name_of(device);
  figure.ranks = world.size;
  figure.nodes = 1;
  figure.hidden = options.hidden;
  figure.topk = options.topk;
  figure.experts = options.experts;
  return figure;
}

void set_times(Figure& figure, const Timing& timing) {
  const auto set = [](Figure::Number& number, double seconds) {
    if (seconds > 0) number = seconds * 1e6;
  };
  set(figure.median_us, timing.median);
  set(figure.min_us, timing.fastest);
  set(figure.max_us, timing.slowest);
  set(figure.mean_us, timing.mean);
  set(figure.wall_us, timing.wall);
  set(figure.pipelined_us, timing.back_to_back);
}

nlohmann::json timing_json(const Timing& timing) {
  return {{"median_us", timing.median * 1e6},
          {"fastest_us", timing.fastest * 1e6},
          {"slowest_us", timing.slowest * 1e6},
          {"mean_us", timing.mean * 1e6},
          {"back_to_back_us", timing.back_to_back * 1e6}};
}

std::string show_microseconds(double seconds) { return seconds > 0 ? fmt::format("{:.1f}", seconds * 1e6) : "-"; }

std::string show_rate(double gb_per_s) { return gb_per_s > 0 ? fmt::format("{:.4g}", gb_per_s) : "-"; }

}  // namespace deep_ep::tools
