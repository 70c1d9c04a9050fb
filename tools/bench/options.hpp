// What the benchmarks of `deep_ep bench` have in common: options, and how results are printed.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/bench/measure.hpp"
#include "tools/bench/output/report.hpp"
#include "tools/bench/world.hpp"

namespace CLI {
class App;
}

namespace deep_ep::tools {

struct BenchOptions {
  int ranks = 0;           ///< 0: not given
  int spawn = 0;           ///< processes to start, each of them a rank; 0: none
  int ranks_per_node = 0;  ///< instead of it
  std::string device = "auto";
  std::vector<std::int64_t> tokens;
  int hidden = 0;
  int topk = 8;
  int experts = 0;
  std::string dtype = "both";  ///< of dispatched rows: fp8, bf16, both, or see BenchKind
  Rounds rounds{-1, 0};
  bool check = false;  ///< compare every result with what it must be
  bool quick = false;  ///< small sizes, few rounds, and the check
  OutputOptions output{};
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
  bool more_dtypes = false;  ///< also fp8-token and nvfp4
};

void add_options(CLI::App& command, const BenchKind& kind, BenchOptions& options);

/// The world of --ranks or --num-processes. `nodes`: as the user gave it; becomes the number of processes where each of
/// them is a node.
World make_world(const BenchOptions& options, int& nodes);

/// Fills in what the user left out, then throws InvalidArgument, in words of the command line, if it does not fit.
void complete(const BenchKind& kind, BenchOptions& options, Device::Kind device, int ranks);

/// The first line of a table.
void print_setting(const BenchOptions& options, const World& world, Device::Kind device);
/// The setting as JSON.
nlohmann::json setting_json(const BenchKind& kind, const BenchOptions& options, const World& world,
                            Device::Kind device);
/// The fields that all figures of a run have in common; and the times of one.
Figure setting_figure(const BenchKind& kind, const BenchOptions& options, const World& world, Device::Kind device);
void set_times(Figure& figure, const Timing& timing);

/// "12.3", or "-" where nothing was measured.
std::string show_microseconds(const Figure::Number& us);
std::string show_rate(const Figure::Number& gb_per_s);

/// Called for each measurement as it is made, on global rank 0's process.
using FigureReport = std::function<void(const Figure& figure)>;

}  // namespace deep_ep::tools
