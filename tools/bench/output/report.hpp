// Output of a benchmark's figures: a table, or CSV. All commands share it.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/output/figure.hpp"

namespace deep_ep::tools {

/// A column of the table for people: texts on the left, numbers on the right.
struct TableColumn {
  FigureColumn field;  ///< its name is the title
  int width;
  bool is_rate = false;  ///< four digits count, not one behind the point
};

class Report {
 public:
  /// `csv`: instead of a table. `speaks`: this process prints; of several processes one does.
  Report(bool csv, bool speaks, std::vector<TableColumn> table);

  bool prints_text() const { return speaks_ && !csv_; }
  const std::vector<Figure>& figures() const { return figures_; }

  /// Prints what stands in front of all figures: `explanation` in front of the table.
  void begin(const std::string& explanation) const;
  /// Prints its line at once.
  void add(const Figure& figure);

 private:
  bool csv_;
  bool speaks_;
  std::vector<TableColumn> table_;
  std::vector<Figure> figures_;
};

}  // namespace deep_ep::tools
