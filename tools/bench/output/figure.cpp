#include "tools/bench/output/figure.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <type_traits>

namespace deep_ep::tools {

const std::vector<FigureColumn>& figure_columns() {
#define DEEP_EP_COLUMN(kind, name) {#name, &Figure::name},
  static const std::vector<FigureColumn> columns = {DEEP_EP_FIGURE_COLUMNS(DEEP_EP_COLUMN)};
#undef DEEP_EP_COLUMN
  return columns;
}

std::string text_of(const Figure& figure, const FigureColumn& column, const char* number_format) {
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = figure.*member;
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, Figure::Text>) {
          return value;
        } else {
          constexpr bool kCount = std::is_same_v<Value, Figure::Count>;
          return value ? fmt::format(fmt::runtime(kCount ? "{}" : number_format), *value) : "";
        }
      },
      column.member);
}

std::string figure_csv_header() {
  std::vector<std::string> names;
  for (const FigureColumn& column : figure_columns()) names.emplace_back(column.name);
  return fmt::format("{}\n", fmt::join(names, ","));
}

std::string figure_csv_line(const Figure& figure) {
  std::vector<std::string> fields;
  for (const FigureColumn& column : figure_columns()) fields.push_back(text_of(figure, column, "{:.6g}"));
  return fmt::format("{}\n", fmt::join(fields, ","));
}

}  // namespace deep_ep::tools
