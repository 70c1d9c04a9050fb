#include "tools/bench/output/report.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "deep_ep/error.hpp"
#include "tools/bench/output/compare.hpp"
#include "tools/common/json_output.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

Report::Report(const OutputOptions& options, bool speaks, nlohmann::json setting)
    : options_(options), speaks_(speaks), document_(std::move(setting)) {
  document_["measurements"] = nlohmann::json::array();
  always_show_progress(options.progress && speaks);
  if (!options.compare.empty()) {
    reference_ = read_results(find_results(options.compare).string());
    reference_->name = options.compare;
  }
  if (speaks && options.csv) fmt::print("{}", figure_csv_header());
}

void Report::add(const Figure& figure) {
  figures_.push_back(figure);
  if (options_.json) document_["measurements"].push_back(figure_json(figure));
  if (!speaks_ || options_.text()) return;  // a table shows what has been measured
  clear_progress();
  if (options_.csv) {
    fmt::print("{}", figure_csv_line(figure));
    std::fflush(stdout);
  }
  show_progress(fmt::format("measured: {} {} {}{}", figure.operation, figure.dtype, figure.mode,
                            figure.tokens ? fmt::format(", {} tokens", *figure.tokens) : ""));
}

int Report::finish_comparison() {
  const Comparison comparison = compare(figures_, *reference_);
  if (options_.json) {
    document_["comparison"] = comparison.json();
  } else {
    // CSV goes on where a program reads it, without people's tables between.
    fmt::print(options_.csv ? stderr : stdout, "{}", comparison.text());
  }
  if (comparison.figures.empty()) return 1;
  if (!options_.fail_below || comparison.worst_ratio() >= *options_.fail_below) return 0;
  fmt::print(stderr, "deep_ep: --fail-below {:g}: the least ratio is {:.3g}\n", *options_.fail_below,
             comparison.worst_ratio());
  return 1;
}

int Report::finish() {
  if (!speaks_) return 0;
  clear_progress();
  const int status = reference_ ? finish_comparison() : 0;
  if (options_.json) print_json(document_);
  return status;
}

}  // namespace deep_ep::tools
