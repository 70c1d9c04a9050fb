// What a benchmark does with its figures besides its table: CSV, comparison with a file, plot. All commands share it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/output/results.hpp"

namespace CLI {
class App;
}

namespace deep_ep::tools {

struct OutputOptions {
  bool json = false;
  bool csv = false;
  std::string compare;               ///< a file of results
  std::optional<double> fail_below;  ///< the least ratio
  std::string plot;                  ///< an SVG file to write
  std::string plot_over;             ///< a column, or empty
  bool progress = false;             ///< also where stderr is no terminal

  bool text() const { return !json && !csv; }
};

void add_output_options(CLI::App& command, OutputOptions& options);
/// The options that a plot has, for commands that only plot.
void add_plot_over_option(CLI::App& command, std::string& over);

class Report {
 public:
  /// Reads what is to be compared with, so that a wrong name is found before the run. `speaks`: this process prints; of
  /// several processes one does.
  Report(const OutputOptions& options, bool speaks);

  /// Prints its line at once with --csv.
  void add(const Figure& figure);
  const std::vector<Figure>& figures() const { return figures_; }

  /// Compares and plots. Returns the exit status. With --json, `document` gets the comparison.
  int finish(nlohmann::json* document = nullptr);

 private:
  int finish_comparison(nlohmann::json* document);

  const OutputOptions& options_;
  bool speaks_;
  std::optional<ResultFile> reference_;
  std::vector<Figure> figures_;
};

}  // namespace deep_ep::tools
