// Output of a benchmark's figures: a table, CSV, comparison with a file. All commands share it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/bench/output/results.hpp"

namespace CLI {
class App;
}

namespace deep_ep::tools {

struct OutputOptions {
  bool csv = false;
  std::string compare;               ///< a file of results
  std::optional<double> fail_below;  ///< the least ratio
  bool progress = false;             ///< also where stderr is no terminal
};

void add_output_options(CLI::App& command, OutputOptions& options);

/// A column of the table for people: texts on the left, numbers on the right.
struct TableColumn {
  FigureColumn field;  ///< its name is the title
  int width;
  bool is_rate = false;  ///< four digits count, not one behind the point
};

class Report {
 public:
  /// Reads what is to be compared with, so that a wrong name is found before the run. `speaks`: this process prints; of
  /// several processes one does.
  Report(const OutputOptions& options, bool speaks, std::vector<TableColumn> table);

  bool prints_text() const { return speaks_ && !options_.csv; }
  const std::vector<Figure>& figures() const { return figures_; }

  /// Prints what stands in front of all figures: `explanation` in front of the table.
  void begin(const std::string& explanation) const;
  /// Prints its line at once.
  void add(const Figure& figure);
  /// Compares. Returns the exit status.
  int finish();

 private:
  int finish_comparison();

  const OutputOptions& options_;
  bool speaks_;
  std::vector<TableColumn> table_;
  std::optional<ResultFile> reference_;
  std::vector<Figure> figures_;
};

}  // namespace deep_ep::tools
