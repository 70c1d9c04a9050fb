// What the benchmarks of `deep_ep bench` have in common: options, and how results are printed.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tools/bench/measure.hpp"
#include "tools/bench/world.hpp"
#include "tools/common/json_output.hpp"

namespace CLI {
class App;
}

namespace deep_ep::tools {

struct BenchOptions {
  int ranks = 0;
  std::string device = "auto";
  std::vector<std::int64_t> tokens;
  int hidden = 0;
  int topk = 8;
  int experts = 0;
  std::string dtype = "both";  ///< of dispatched rows: fp8, bf16, both
  Rounds rounds{-1, 0};
  bool check = false;  ///< compare every result with what it must be
  bool json = false;
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
  BenchLimits limits;
  const char* dtype_help;
};

void add_options(CLI::App& command, const BenchKind& kind, BenchOptions& options);

/// Fills in what the user left out, then throws InvalidArgument, in words of the command line, if it does not fit.
void complete(const BenchKind& kind, BenchOptions& options, Device::Kind device, int ranks);

/// The first line of a table.
void print_setting(const BenchOptions& options, const World& world, Device::Kind device);
/// The setting as JSON.
nlohmann::json setting_json(const BenchKind& kind, const BenchOptions& options, const World& world,
                            Device::Kind device);
nlohmann::json timing_json(const Timing& timing);

/// "12.3", or "-" where nothing was measured.
std::string show_microseconds(double seconds);
std::string show_rate(double gb_per_s);

/// Calls run(report) and prints what is reported: at once with `print_line`, or at the end one JSON document with
/// `to_json` of each.
template <class Measurement, class Run>
void print_measurements(const BenchOptions& options, const World& world, nlohmann::json setting,
                        void (*print_line)(const Measurement&), nlohmann::json (*to_json)(const Measurement&),
                        Run&& run) {
  nlohmann::json measurements = nlohmann::json::array();
  run([&](const Measurement& measurement) {
    options.json ? measurements.push_back(to_json(measurement)) : print_line(measurement);
  });
  if (world.first_rank != 0 || !options.json) return;
  setting["measurements"] = std::move(measurements);
  print_json(setting);
}

}  // namespace deep_ep::tools
