// Line charts as SVG.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace deep_ep::tools {

struct ChartLine {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< by x
};

struct Chart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<ChartLine> lines;
};

/// The y axis begins at 0. Where x spans more than a factor of 16 (tokens, bytes), its axis is logarithmic.
std::string to_svg(const Chart& chart);

}  // namespace deep_ep::tools
