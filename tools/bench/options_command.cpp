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

void add_output_options(CLI::App& command, OutputOptions& options) {
  CLI::Option* json = command.add_flag("--json", options.json, "Print JSON");
  command.add_flag("--csv", options.csv, "Print CSV: a line of column names, then one for each measurement")
      ->excludes(json);
  CLI::Option* compare =
      command.add_option("--compare", options.compare,
                         "Also print these figures beside those of FILE.csv, or of results that come with the library "
                         "(seed-b200): only what has the same shape");
  command
      .add_option("--fail-below", options.fail_below,
                  "With --compare: exit with 1 where a ratio is below this; 1 = as fast as there")
      ->check(CLI::PositiveNumber)
      ->needs(compare);
  command.add_flag("--progress", options.progress,
                   "Say on stderr what is being measured, also where that is no terminal");
}

}  // namespace deep_ep::tools
