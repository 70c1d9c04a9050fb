// The common parts of the benchmarks of dispatch and combine: options, the ranks of a run, its figures.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/bench/measure.hpp"
#include "tools/bench/output/report.hpp"
#include "tools/bench/world.hpp"
#include "tools/commands.hpp"

namespace deep_ep::tools {

struct BenchOptions {
  int ranks = 0;           ///< 0: not given
  int spawn = 0;           ///< processes to start, each of them a rank; 0: none
  int ranks_per_node = 0;  ///< instead of it
  int nodes = 1;           ///< that the ranks play, of equal size; 0: those that they are on
  int groups = 0;          ///< nodes that a token's experts may be on, 0 = all
  std::string device = "auto";
  std::vector<std::int64_t> tokens;
  int hidden = 0;
  int topk = 8;
  int experts = 0;
  std::string dtype = "both";  ///< of dispatched rows: fp8, bf16, both, or see BenchKind
  Rounds rounds{-1, 0};
  bool check = false;  ///< compare every result with what it must be
  bool quick = false;  ///< small sizes, few rounds, and the check
  bool csv = false;    ///< instead of a table
};

/// Sizes that suit a device, where the user gives none.
struct BenchSizes {
  std::int64_t tokens;
  int hidden;
  int experts;  ///< rounded up, so that ranks share them evenly
  int rounds;
  int warmup;
};

struct BenchLimits {
  std::int64_t fewest_tokens;
  std::int64_t most_tokens;
  int hidden_multiple;
  int most_experts;
};

/// A benchmark as the command line sees it.
struct BenchKind {
  const char* name;
  BenchSizes gpu;
  BenchSizes cpu;
  BenchSizes quick_gpu;
  BenchSizes quick_cpu;
  BenchLimits limits;
  const char* dtype_help;
  bool has_nvfp4 = false;
};

void add_options(CLI::App& command, const BenchKind& kind, BenchOptions& options);

/// A benchmark whose ranks have met.
struct BenchRun {
  /// Fills in what the user left out. @throws InvalidArgument, in words of the command line, if it does not fit.
  BenchRun(const BenchKind& kind, BenchOptions& options);

  /// Measures each number of tokens on all ranks of this process. Collective over the processes.
  void measure(const RankWork& work) const;

  BenchOptions& options;
  World world;
  Device::Kind device;
  bool speaks;       ///< this process has global rank 0
  Figure common;     ///< what all figures have in common
  std::string text;  ///< the run in a line
};

/// `common` with what one measurement adds.
Figure figure_of(const Figure& common, const WorkloadShape& shape, const char* operation, const char* dtype,
                 const char* mode);
void set_times(Figure& figure, const Timing& timing);

// Lines as DeepEP's own tests print them, so that programs that read their logs read ours as well.

/// The lines of test_intranode.py and test_internode.py: setting, layout, each configuration with `tune`, the best one.
/// They count over NVLink all that is received, and over RDMA also what stays in the node. This library has no chunks
/// inside a node ("default", and 1 where a number has to be) and chunks of 16 rows between nodes.
std::string normal_mode_lines(const BenchOptions& options, bool tune, const std::vector<Figure>& figures);
/// The lines of test_low_latency.py. There each rank prints its own times; here rank 0 prints the slowest rank's.
std::string low_latency_lines(const BenchOptions& options, int ranks, const std::vector<Figure>& figures);

/// --spawn: this command again, as processes of this host that are its ranks. Once one has ended badly, a line names
/// it, the others get SIGTERM, and SIGKILL 5 s later. Returns its status, 128 + n for signal n.
int run_as_processes(int ranks);

// The subcommands of `deep_ep bench` that have files of their own.
void add_bench_low_latency(CLI::App& bench, Action& action);
void add_bench_selftest(CLI::App& bench, Action& action);

}  // namespace deep_ep::tools
