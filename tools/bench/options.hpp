// What the benchmarks of `deep_ep bench` have in common: options, and how results are printed.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tools/bench/measure.hpp"
#include "tools/bench/output/report.hpp"
#include "tools/bench/world.hpp"
#include "tools/common/json_output.hpp"

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
nlohmann::json timing_json(const Timing& timing);
/// The setting as a figure, and its times.
Figure setting_figure(const BenchKind& kind, const BenchOptions& options, const World& world, Device::Kind device);
void set_times(Figure& figure, const Timing& timing);

/// "12.3", or "-" where nothing was measured.
std::string show_microseconds(double seconds);
std::string show_rate(double gb_per_s);

/// Brings measurements to all outputs that the user wants: a table's line at once, or a line of CSV, or at the end one
/// JSON document.
template <class Measurement>
class Measurements {
 public:
  struct Forms {
    void (*line)(const Measurement&);
    nlohmann::json (*json)(const Measurement&);
    void (*fill)(Figure& figure, const Measurement&);
  };

  Measurements(const BenchOptions& options, const World& world, nlohmann::json setting, Figure figure,
               const Forms& forms)
      : options_(options),
        speaks_(world.first_rank == 0),
        document_(std::move(setting)),
        setting_(std::move(figure)),
        forms_(forms),
        report_(options.output, speaks_) {
    document_["measurements"] = nlohmann::json::array();
  }

  void add(const Measurement& measurement) {
    if (options_.output.text()) forms_.line(measurement);
    if (options_.output.json) document_["measurements"].push_back(forms_.json(measurement));
    Figure figure = setting_;
    forms_.fill(figure, measurement);
    report_.add(figure);
  }

  /// Returns the exit status.
  int finish() {
    const int status = report_.finish(options_.output.json ? &document_ : nullptr);
    if (speaks_ && options_.output.json) print_json(document_);
    return status;
  }

 private:
  const BenchOptions& options_;
  bool speaks_;
  nlohmann::json document_;
  Figure setting_;
  Forms forms_;
  Report report_;
};

}  // namespace deep_ep::tools
