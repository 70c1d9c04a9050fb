#include "tools/bench/output/report.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "tools/bench/output/compare.hpp"
#include "tools/common/child.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

std::string aligned(const TableColumn& column, const std::string& text) {
  const bool is_text = std::holds_alternative<Figure::Text Figure::*>(column.field.member);
  return is_text ? fmt::format(" {:<{}}", text, column.width) : fmt::format(" {:>{}}", text, column.width);
}

std::string shown(const TableColumn& column, const Figure& figure) {
  const nlohmann::json value = value_of(figure, column.field);
  if (value.is_null()) return "-";
  if (value.is_string()) return value;
  if (!value.is_number_float()) return value.dump();
  return column.is_rate ? fmt::format("{:.4g}", value.get<double>()) : fmt::format("{:.1f}", value.get<double>());
}

}  // namespace

Report::Report(const OutputOptions& options, bool speaks, std::vector<TableColumn> table)
    : options_(options), speaks_(speaks), table_(std::move(table)) {
  always_show_progress(options.progress && speaks);
  if (options.compare.empty()) return;
  reference_ = read_results(find_results(options.compare, own_program()).string());
  reference_->name = options.compare;
}

void Report::begin(const std::string& explanation) const {
  if (speaks_ && options_.csv) fmt::print("{}", figure_csv_header());
  if (!prints_text()) return;
  std::string head;
  for (const TableColumn& column : table_) head += aligned(column, column.field.name);
  fmt::print("{}\n{}\n", explanation, head);
  std::fflush(stdout);  // in front of an error
}

void Report::add(const Figure& figure) {
  figures_.push_back(figure);
  if (!speaks_) return;
  clear_progress();
  if (prints_text()) {
    std::string line;
    for (const TableColumn& column : table_) line += aligned(column, shown(column, figure));
    fmt::print("{}\n", line);
  } else {
    fmt::print("{}", figure_csv_line(figure));
    show_progress(fmt::format("measured: {} {} {}{}", figure.operation, figure.dtype, figure.mode,
                              figure.tokens ? fmt::format(", {} tokens", *figure.tokens) : ""));
  }
  std::fflush(stdout);
}

int Report::finish_comparison() {
  const Comparison comparison = compare(figures_, *reference_);
  // CSV goes on where a program reads it, without people's tables between.
  fmt::print(options_.csv ? stderr : stdout, "{}", comparison.text());
  if (comparison.figures.empty()) return 1;
  if (!options_.fail_below || comparison.worst_ratio() >= *options_.fail_below) return 0;
  fmt::print(stderr, "deep_ep: --fail-below {:g}: the least ratio is {:.3g}\n", *options_.fail_below,
             comparison.worst_ratio());
  return 1;
}

int Report::finish() {
  if (!speaks_) return 0;
  clear_progress();
  return reference_ ? finish_comparison() : 0;
}

}  // namespace deep_ep::tools
