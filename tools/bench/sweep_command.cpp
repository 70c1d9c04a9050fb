// `deep_ep bench sweep`.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/output/plot.hpp"
#include "tools/bench/output/report.hpp"
#include "tools/bench/sweep.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

struct SweepCommand {
  SweepOptions sweep;
  std::string plot;
  std::string plot_over;
  bool quick = false;
  bool progress = false;
};

template <class T>
void fill_in(std::vector<T>& axis, bool quick, std::vector<T> few, std::vector<T> all) {
  if (axis.empty()) axis = quick ? std::move(few) : std::move(all);
}

/// Full axes are for GPUs: on the CPU one cell of them takes minutes.
void complete(SweepCommand& command) {
  SweepOptions& sweep = command.sweep;
  if (sweep.ranks == 0) {
    if (!sweep.launcher.empty()) throw InvalidArgument("--launcher: --ranks is missing, the ranks that it starts");
    const int gpus = sweep.device == "cpu" ? 0 : cuda_device_count();
    sweep.ranks = gpus > 1 ? gpus : 4;
  }
  const bool quick = command.quick;
  fill_in(sweep.modes, quick, {"intranode", "internode"}, {"intranode", "internode", "low-latency"});
  fill_in(sweep.hidden, quick, {256}, {1024, 2048, 3072, 4096, 5120, 6144, 7168});
  fill_in(sweep.topk, quick, {4, 8}, {4, 8, 16, 32});
  fill_in(sweep.experts_per_node, quick, {16}, {32, 64, 128, 256});
  fill_in(sweep.groups, quick, {2}, {1, 2});
  fill_in<std::int64_t>(sweep.tokens, quick, {8}, {128, 4096});
  if (quick && sweep.more.empty()) sweep.more = {"--iterations", "2", "--warmup", "1", "--check"};
}

int run_sweep_command(SweepCommand command) {
  complete(command);
  always_show_progress(command.progress);
  const SweepCounts counts = run_sweep(command.sweep);
  if (!command.plot.empty()) {
    write_text(command.plot, to_svg(plot_bandwidth(read_results(command.sweep.file).figures, command.plot_over)));
  }
  fmt::print("{}: {} shapes measured, {} impossible, {} failed, {} were there already\n", command.sweep.file,
             counts.measured, counts.impossible, counts.failed, counts.there);
  return counts.failed == 0 ? 0 : 1;
}

}  // namespace

void add_bench_sweep(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "sweep", "Measure many shapes, each by a process of its own, into a CSV file; goes on where it was interrupted");
  auto options = std::make_shared<SweepCommand>();
  SweepOptions& o = options->sweep;
  const auto axis = [&](const char* name, auto& values, const char* help, int least, int most) {
    command->add_option(name, values, help)->delimiter(',')->check(CLI::Range(least, most));
  };
  command->add_option("--mode", o.modes, "Benchmarks: intranode, internode, low-latency (default: all)")
      ->delimiter(',')
      ->check(CLI::IsMember({"intranode", "internode", "low-latency"}));
  axis("--hidden", o.hidden, "Channels of a token (default 1024 to 7168 by 1024)", 16, 65536);
  axis("--topk,--num-topk", o.topk, "Experts of each token (default 4,8,16,32)", 1, 32);
  axis("--experts-per-node", o.experts_per_node, "Experts of a node (default 32,64,128,256)", 1, 65536);
  axis("--groups,--num-topk-groups", o.groups, "internode: nodes that a token's experts are on (default 1,2); 0 = any",
       0, kMostRanks);
  axis("--tokens,--num-tokens", o.tokens, "Tokens of each rank (default 128,4096)", 0, 1 << 20);
  add_ranks_option(*command, o.ranks, "Ranks (default: one for every GPU, 4 on the CPU)");
  command->add_option("--nodes", o.nodes, "internode: nodes that the ranks play")
      ->check(CLI::Range(2, kMostRanks))
      ->capture_default_str();
  add_device_option(*command, o.device);
  command->add_option("--out", o.file, "The CSV file; shapes that are in it are not measured again, failures are")
      ->capture_default_str();
  command->add_option("--launcher", o.launcher, "Words in front of each benchmark, as 'mpirun -np 16'");
  command->add_option("--seconds", o.seconds, "How long a shape may take")
      ->check(CLI::Range(1.0, 86400.0))
      ->capture_default_str();
  command->add_flag("--quick", options->quick,
                    "Two small shapes of a node and two between nodes: does it work at all?");
  command->add_option("--plot", options->plot, "Also draw all that is in the file, as this SVG file");
  add_plot_over_option(*command, options->plot_over);
  command->add_flag("--progress", options->progress,
                    "Say on stderr what is being measured, also where that is no terminal");
  command->add_option("options", o.more, "After --: options for each benchmark");
  command->footer("Exit status: 1 if a shape failed; the file says why.");
  command->callback([options, &action] { action = [options] { return run_sweep_command(*options); }; });
}

}  // namespace deep_ep::tools
