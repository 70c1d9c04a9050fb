#include "tools/bench/output/report.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

std::string aligned(const TableColumn& column, const std::string& text) {
  const bool is_text = std::holds_alternative<Figure::Text Figure::*>(column.field.member);
  return is_text ? fmt::format(" {:<{}}", text, column.width) : fmt::format(" {:>{}}", text, column.width);
}

std::string shown(const TableColumn& column, const Figure& figure) {
  const std::string text = text_of(figure, column.field, column.is_rate ? "{:.4g}" : "{:.1f}");
  return text.empty() ? "-" : text;
}

}  // namespace

Report::Report(bool csv, bool speaks, std::vector<TableColumn> table)
    : csv_(csv), speaks_(speaks), table_(std::move(table)) {}

void Report::begin(const std::string& explanation) const {
  if (speaks_ && csv_) fmt::print("{}", figure_csv_header());
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

}  // namespace deep_ep::tools
