// One measurement as every kind of output has it: a row of a CSV file, an object of JSON, what is compared.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace deep_ep::tools {

/// results/README.md says what each field means.
struct Figure {
  using Text = std::string;
  using Count = std::optional<std::int64_t>;
  using Number = std::optional<double>;

  // What was measured; its shape; how it was done; what came out.
  Text benchmark{}, operation{}, dtype{}, mode{}, part{}, by{}, device{}, nic{};
  Count ranks{}, nodes{}, tokens{}, hidden{}, topk{}, experts{}, groups{}, bytes{};
  Count sms{}, nvl_chunk{}, rdma_chunk{}, warps{};
  Number median_us{}, min_us{}, max_us{}, mean_us{}, wall_us{}, pipelined_us{}, host_us{}, notify_us{};
  Number gb_per_s{}, rdma_gb_per_s{}, alg_gb_per_s{}, nvlink_wire_gb_per_s{}, rdma_wire_gb_per_s{}, nominal_gb_per_s{};
  Text status = "ok", note{};
};

/// A column of the CSV files, in their order.
struct FigureColumn {
  const char* name;
  std::variant<Figure::Text Figure::*, Figure::Count Figure::*, Figure::Number Figure::*> member;
};
const std::vector<FigureColumn>& figure_columns();

/// A field: a string, a number, or null where there is no value.
nlohmann::json value_of(const Figure& figure, const FigureColumn& column);
/// @throws InvalidArgument, without saying where, for a text that is no such value.
void set_field(Figure& figure, const FigureColumn& column, const std::string& text);
/// All fields that have a value, by the names of columns.
nlohmann::json figure_json(const Figure& figure);

/// The first line of a CSV file, and that of a measurement.
std::string figure_csv_header();
std::string figure_csv_line(const Figure& figure);

/// CSV as spreadsheets write and read it: a field with commas or quotes is quoted. Line ends within fields become
/// blanks.
std::string csv_line(const std::vector<std::string>& fields);
/// The fields of a line. @throws InvalidArgument, without saying where, for a quote without its other end.
std::vector<std::string> csv_fields(std::string_view line);

}  // namespace deep_ep::tools
