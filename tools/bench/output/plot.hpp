// Bandwidth over what was varied.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/output/chart.hpp"
#include "tools/bench/output/figure.hpp"

namespace deep_ep::tools {

/// Columns that a plot may go over.
const std::vector<std::string>& plot_axes();

/// A line for every operation and setting; those without bandwidth are left out. `over`: a column, or empty for the
/// first one that has several values. @throws InvalidArgument where no measurement has a value in that column.
Chart plot_bandwidth(const std::vector<Figure>& figures, const std::string& over);

}  // namespace deep_ep::tools
