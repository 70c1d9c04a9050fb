// One measurement as every kind of output has it: a row of a CSV file, a line of a table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace deep_ep::tools {

/// The columns of the CSV files, in their order; results/README.md says what each means.
// clang-format off
#define DEEP_EP_FIGURE_COLUMNS(X)                                                                                     \
  X(Text, benchmark) X(Text, operation) X(Text, dtype) X(Text, mode) X(Text, part) X(Text, by) X(Text, device)        \
  X(Text, nic) X(Count, ranks) X(Count, nodes) X(Count, tokens) X(Count, hidden) X(Count, topk) X(Count, experts)     \
  X(Count, groups) X(Count, bytes) X(Count, sms) X(Count, nvl_chunk) X(Count, rdma_chunk) X(Number, median_us)        \
  X(Number, min_us) X(Number, max_us) X(Number, mean_us) X(Number, wall_us) X(Number, pipelined_us)                   \
  X(Number, host_us) X(Number, notify_us) X(Number, gb_per_s) X(Number, rdma_gb_per_s) X(Number, alg_gb_per_s)        \
  X(Number, nvlink_wire_gb_per_s) X(Number, rdma_wire_gb_per_s) X(Number, nominal_gb_per_s) X(Count, warps)           \
  X(Text, status) X(Text, note)
// clang-format on

struct Figure {
  using Text = std::string;
  using Count = std::optional<std::int64_t>;
  using Number = std::optional<double>;
#define DEEP_EP_FIELD(kind, name) kind name{};
  DEEP_EP_FIGURE_COLUMNS(DEEP_EP_FIELD)
#undef DEEP_EP_FIELD
  Figure() { status = "ok"; }
};

struct FigureColumn {
  const char* name;
  std::variant<Figure::Text Figure::*, Figure::Count Figure::*, Figure::Number Figure::*> member;
};
const std::vector<FigureColumn>& figure_columns();

/// A field as text; empty where there is no value. `number_format`: of numbers that are no counts.
std::string text_of(const Figure& figure, const FigureColumn& column, const char* number_format);

/// The first line of a CSV file, and that of a measurement.
std::string figure_csv_header();
std::string figure_csv_line(const Figure& figure);

}  // namespace deep_ep::tools
