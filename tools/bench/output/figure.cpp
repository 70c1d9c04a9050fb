#include "tools/bench/output/figure.hpp"

#include <algorithm>
#include <cmath>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {

const std::vector<FigureColumn>& figure_columns() {
#define DEEP_EP_COLUMN(kind, name) {#name, &Figure::name},
  static const std::vector<FigureColumn> columns = {DEEP_EP_FIGURE_COLUMNS(DEEP_EP_COLUMN)};
#undef DEEP_EP_COLUMN
  return columns;
}

nlohmann::json value_of(const Figure& figure, const FigureColumn& column) {
  return std::visit(
      [&](auto member) -> nlohmann::json {
        const auto& value = figure.*member;
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Figure::Text>) {
          return value.empty() ? nlohmann::json() : nlohmann::json(value);
        } else {
          return value ? nlohmann::json(*value) : nlohmann::json();
        }
      },
      column.member);
}

void set_field(Figure& figure, const FigureColumn& column, const std::string& text) {
  const auto parse = [&]<class T>(std::optional<T>& value, const char* allowed) {
    value = parse_number<T>(text);
    if (!value && !text.empty()) fail<InvalidArgument>("'{}' is no {}", text, allowed);
  };
  if (auto* const name = std::get_if<Figure::Text Figure::*>(&column.member)) {
    figure.*(*name) = text;
  } else if (auto* const count = std::get_if<Figure::Count Figure::*>(&column.member)) {
    parse(figure.*(*count), "whole number");
  } else {
    Figure::Number& number = figure.*std::get<Figure::Number Figure::*>(column.member);
    parse(number, "number");
    if (number && !std::isfinite(*number)) fail<InvalidArgument>("'{}' is no number", text);
  }
}

std::string figure_csv_header() {
  std::vector<std::string> names;
  for (const FigureColumn& column : figure_columns()) names.emplace_back(column.name);
  return csv_line(names);
}

std::string figure_csv_line(const Figure& figure) {
  std::vector<std::string> fields;
  for (const FigureColumn& column : figure_columns()) {
    const nlohmann::json value = value_of(figure, column);
    fields.push_back(value.is_null()           ? ""
                     : value.is_string()       ? value.get<std::string>()
                     : value.is_number_float() ? fmt::format("{:.6g}", value.get<double>())
                                               : value.dump());
  }
  return csv_line(fields);
}

std::string csv_line(const std::vector<std::string>& fields) {
  std::string line;
  for (const std::string& field : fields) {
    const bool quoted = field.find_first_of(",\"") != std::string::npos || field.starts_with('#');
    if (quoted) line += '"';
    for (const char c : field) line += c == '"' ? "\"\"" : std::string(1, c == '\n' || c == '\r' ? ' ' : c);
    line += quoted ? "\"," : ",";
  }
  if (!line.empty()) line.pop_back();
  return line + '\n';
}

std::vector<std::string> csv_fields(std::string_view line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool quote = line[i] == '"';
    if (quoted && quote && line.substr(i + 1).starts_with('"')) {
      fields.back() += line[++i];
    } else if (quote && (quoted || fields.back().empty())) {
      quoted = !quoted;
    } else if (line[i] == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += line[i];
    }
  }
  if (quoted) throw InvalidArgument("a field begins with a quote and does not end with one");
  return fields;
}

}  // namespace deep_ep::tools
