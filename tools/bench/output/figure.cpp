#include "tools/bench/output/figure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "deep_ep/error.hpp"
#include "tools/bench/output/csv.hpp"

namespace deep_ep::tools {
namespace {

template <class Value>
Value parse_number(const std::string& text, const char* allowed) {
  Value value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) throw InvalidArgument(fmt::format("'{}' is no {}", text, allowed));
  return value;
}

}  // namespace

const std::vector<FigureColumn>& figure_columns() {
  static const std::vector<FigureColumn> columns = {
      {"benchmark", &Figure::benchmark},
      {"operation", &Figure::operation},
      {"dtype", &Figure::dtype},
      {"mode", &Figure::mode},
      {"part", &Figure::part},
      {"by", &Figure::by},
      {"device", &Figure::device},
      {"nic", &Figure::nic},
      {"ranks", &Figure::ranks},
      {"nodes", &Figure::nodes},
      {"tokens", &Figure::tokens},
      {"hidden", &Figure::hidden},
      {"topk", &Figure::topk},
      {"experts", &Figure::experts},
      {"groups", &Figure::groups},
      {"bytes", &Figure::bytes},
      {"sms", &Figure::sms},
      {"nvl_chunk", &Figure::nvl_chunk},
      {"rdma_chunk", &Figure::rdma_chunk},
      {"median_us", &Figure::median_us},
      {"min_us", &Figure::min_us},
      {"max_us", &Figure::max_us},
      {"mean_us", &Figure::mean_us},
      {"wall_us", &Figure::wall_us},
      {"pipelined_us", &Figure::pipelined_us},
      {"host_us", &Figure::host_us},
      {"notify_us", &Figure::notify_us},
      {"gb_per_s", &Figure::gb_per_s},
      {"rdma_gb_per_s", &Figure::rdma_gb_per_s},
      {"alg_gb_per_s", &Figure::alg_gb_per_s},
      {"nvlink_wire_gb_per_s", &Figure::nvlink_wire_gb_per_s},
      {"rdma_wire_gb_per_s", &Figure::rdma_wire_gb_per_s},
      {"nominal_gb_per_s", &Figure::nominal_gb_per_s},
      {"warps", &Figure::warps},
      {"status", &Figure::status},
      {"note", &Figure::note},
  };
  return columns;
}

const FigureColumn* find_column(std::string_view name) {
  const auto& all = figure_columns();
  const auto found = std::ranges::find_if(all, [&](const FigureColumn& column) { return column.name == name; });
  return found == all.end() ? nullptr : &*found;
}

std::string field_text(const Figure& figure, const FigureColumn& column) {
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = figure.*member;
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Figure::Text>) {
          return value;
        } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Figure::Count>) {
          return value ? fmt::format("{}", *value) : "";
        } else {
          return value ? fmt::format("{:.6g}", *value) : "";
        }
      },
      column.member);
}

void set_field(Figure& figure, const FigureColumn& column, const std::string& text) {
  std::visit(
      [&](auto member) {
        auto& value = figure.*member;
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Figure::Text>) {
          value = text;
        } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Figure::Count>) {
          value.reset();
          if (!text.empty()) value = parse_number<std::int64_t>(text, "whole number");
        } else {
          value.reset();
          if (!text.empty()) value = parse_number<double>(text, "number");
          if (value && !std::isfinite(*value)) throw InvalidArgument(fmt::format("'{}' is no number", text));
        }
      },
      column.member);
}

nlohmann::json figure_json(const Figure& figure) {
  nlohmann::json json = nlohmann::json::object();
  for (const FigureColumn& column : figure_columns()) {
    std::visit(
        [&](auto member) {
          const auto& value = figure.*member;
          if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Figure::Text>) {
            if (!value.empty()) json[column.name] = value;
          } else {
            if (value) json[column.name] = *value;
          }
        },
        column.member);
  }
  return json;
}

std::string figure_csv_header() {
  std::vector<std::string> names;
  for (const FigureColumn& column : figure_columns()) names.emplace_back(column.name);
  return csv_line(names);
}

std::string figure_csv_line(const Figure& figure) {
  std::vector<std::string> fields;
  for (const FigureColumn& column : figure_columns()) fields.push_back(field_text(figure, column));
  return csv_line(fields);
}

}  // namespace deep_ep::tools
