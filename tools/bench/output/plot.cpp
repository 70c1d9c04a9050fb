#include "tools/bench/output/plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

struct Axis {
  const char* column;
  const char* label;
};
constexpr Axis kAxes[] = {{"tokens", "tokens per rank"},
                          {"sms", "SMs"},
                          {"ranks", "ranks"},
                          {"nodes", "nodes"},
                          {"rdma_chunk", "rows in a chunk by RDMA"},
                          {"nvl_chunk", "rows in a chunk by NVLink"},
                          {"hidden", "channels of a token"},
                          {"topk", "experts of a token"},
                          {"experts", "experts"},
                          {"groups", "nodes that a token's experts are on"},
                          {"bytes", "bytes of a message"}};

/// Files of older measurements may have no other rate than that of what really crosses.
bool has_wire_only(const Figure& figure) {
  return !figure.gb_per_s && !figure.rdma_gb_per_s && figure.rdma_wire_gb_per_s.value_or(0) > 0;
}

bool has_rate(const Figure& figure) {
  const bool any = figure.gb_per_s.value_or(0) > 0 || figure.rdma_gb_per_s.value_or(0) > 0 || has_wire_only(figure);
  return figure.status == "ok" && any;
}

/// Which columns do not say the same of all measurements.
std::set<std::string> varied(const std::vector<Figure>& figures) {
  std::map<std::string, std::set<std::string>> values;
  for (const Figure& figure : figures) {
    if (!has_rate(figure)) continue;
    for (const FigureColumn& column : figure_columns()) values[column.name].insert(field_text(figure, column));
  }
  std::set<std::string> names;
  for (const auto& [name, seen] : values) {
    if (seen.size() > 1) names.insert(name);
  }
  return names;
}

std::string name_of_line(const Figure& figure, const std::set<std::string>& varied, const std::string& over) {
  std::string name = figure.operation;
  const auto add = [&](const std::string& word) {
    if (!word.empty() && word != "-") name += (name.empty() ? "" : " ") + word;
  };
  add(figure.dtype);
  add(figure.mode);
  for (const char* column : {"part", "benchmark", "device", "nic"}) {
    if (varied.contains(column)) add(field_text(figure, *find_column(column)));
  }
  if (figure.by != "deep_ep" && !figure.by.empty()) add("by " + figure.by);
  for (const auto& [column, label] : kAxes) {
    if (column == over || !varied.contains(column)) continue;
    const std::string value = field_text(figure, *find_column(column));
    if (!value.empty()) add(fmt::format("{} {}", column, value));
  }
  return name;
}

const Axis& axis_of(const std::set<std::string>& varied, const std::string& over) {
  const auto fits = [&](const Axis& axis) { return over.empty() ? varied.contains(axis.column) : axis.column == over; };
  const auto* found = std::ranges::find_if(kAxes, fits);
  return found == std::end(kAxes) ? kAxes[0] : *found;  // one value of everything: points over tokens
}

/// "intranode: 8 ranks, hidden 7168, top-8 of 256 experts" as far as it is one for all.
std::string title_of(const std::vector<Figure>& figures, const std::set<std::string>& varied) {
  const auto first = std::ranges::find_if(figures, has_rate);
  if (first == figures.end()) return "";
  std::string title = varied.contains("benchmark") ? "deep_ep bench" : first->benchmark;
  const char* between = ": ";
  for (const char* column : {"device", "ranks", "nodes", "tokens", "hidden", "topk", "experts"}) {
    const std::string value = varied.contains(column) ? "" : field_text(*first, *find_column(column));
    if (value.empty()) continue;
    title += fmt::format("{}{}{}", between, column == std::string("device") ? "" : fmt::format("{} ", column), value);
    between = ", ";
  }
  return title;
}

}  // namespace

const std::vector<std::string>& plot_axes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Axis& axis : kAxes) all.emplace_back(axis.column);
    return all;
  }();
  return names;
}

Chart plot_bandwidth(const std::vector<Figure>& figures, const std::string& over) {
  const std::set<std::string> differ = varied(figures);
  const Axis& axis = axis_of(differ, over);
  const FigureColumn& column = *find_column(axis.column);
  std::vector<std::string> order;
  std::map<std::string, std::map<double, double>> lines;
  const auto add = [&](const std::string& name, double x, const Figure::Number& rate) {
    if (rate.value_or(0) <= 0) return;
    if (!lines.contains(name)) order.push_back(name);
    double& best = lines[name][x];
    best = std::max(best, *rate);
  };
  for (const Figure& figure : figures) {
    const std::optional<double> x = number_in(figure, column);
    if (!has_rate(figure) || !x) continue;
    const std::string name = name_of_line(figure, differ, axis.column);
    const bool both = figure.rdma_gb_per_s.has_value();
    add(both ? name + " (NVLink)" : name, *x, figure.gb_per_s);
    add(name + " (RDMA)", *x, figure.rdma_gb_per_s);
    if (has_wire_only(figure)) add(name + " (RDMA wire)", *x, figure.rdma_wire_gb_per_s);
  }
  if (lines.empty()) {
    throw InvalidArgument(fmt::format("there is nothing to plot: no measurement has a bandwidth and {}", axis.label));
  }
  Chart chart{.title = title_of(figures, differ), .x_label = axis.label, .y_label = "GB/s", .lines = {}};
  for (const std::string& name : order) chart.lines.push_back({name, {lines[name].begin(), lines[name].end()}});
  return chart;
}

}  // namespace deep_ep::tools
