// The options that the benchmarks of `deep_ep bench` have in common.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tools/bench/benchmark.hpp"
#include "tools/common/command_line.hpp"

namespace deep_ep::tools {

void add_options(CLI::App& command, const BenchKind& kind, BenchOptions& options) {
  const BenchSizes& gpu = kind.gpu;
  const BenchSizes& cpu = kind.cpu;
  CLI::Option* ranks = add_ranks_option(command, options.ranks, "Ranks (default: one for every GPU, 4 on the CPU)");
  add_number(command, "--num-processes", options.ranks_per_node, 1, kMostRanks,
             "Ranks of each node, instead of --ranks")
      ->excludes(ranks);
  add_number(command, "--spawn", options.spawn, 1, kMostRanks,
             "Ranks of this host as processes that this one starts, not as threads")
      ->excludes(ranks);
  add_device_option(command, options.device);
  add_number(
      command, "--tokens,--num-tokens", options.tokens, kind.limits.fewest_tokens, kind.limits.most_tokens,
      fmt::format("Tokens of each rank, one or several numbers (default {}; {} on the CPU)", gpu.tokens, cpu.tokens))
      ->delimiter(',');
  add_number(command, "--hidden", options.hidden, kind.limits.hidden_multiple, 65536,
             fmt::format("Channels of a token (default {}; {} on the CPU)", gpu.hidden, cpu.hidden));
  add_number(command, "--topk,--num-topk", options.topk, 1, 32, "Experts of each token")->capture_default_str();
  add_number(command, "--experts,--num-experts", options.experts, 1, kind.limits.most_experts,
             fmt::format("Experts of all ranks (default {})", gpu.experts));
  std::vector<std::string> dtypes = {"fp8", "bf16", "both"};
  if (kind.has_nvfp4) dtypes.emplace_back("nvfp4");
  command.add_option("--dtype", options.dtype, kind.dtype_help)->check(CLI::IsMember(dtypes))->capture_default_str();
  add_number(command, "--iterations", options.rounds.count, 1, 100000,
             fmt::format("Timed rounds (default {}; {} on the CPU)", gpu.rounds, cpu.rounds));
  add_number(command, "--warmup", options.rounds.warmup, 0, 100000,
             fmt::format("Rounds before them (default {}; {} on the CPU)", gpu.warmup, cpu.warmup));
  command.add_flag("--check", options.check, "Compare the last round of everything with what it must be");
  command.add_flag("--quick", options.quick, "Small sizes, few rounds, and --check: does it work at all?");
  command.add_flag("--csv", options.csv, "Print CSV: a line of column names, then one for each measurement");
}

}  // namespace deep_ep::tools
