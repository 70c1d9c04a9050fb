// One measurement as every kind of output has it: a row of a CSV file, a point of a plot, what is compared.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace deep_ep::tools {

struct Figure {
  using Text = std::string;
  using Count = std::optional<std::int64_t>;
  using Number = std::optional<double>;

  // What was measured.
  Text benchmark{};  ///< "intranode", "internode", "low-latency", "wire", "nccl"
  Text operation{};  ///< "dispatch", "combine", "layout", "write", "all_reduce", ...
  Text dtype{};      ///< of the rows: "fp8", "bf16"
  Text mode{};       ///< "cached", "exchange", "pull", "plain", ...
  Text part{};       ///< low-latency: "whole", "send", "receive", "graph"
  Text by{};         ///< "deep_ep", "DeepEP", "NCCL 2.30.7", "copy engine"
  Text device{};     ///< "cuda", "cpu"
  Text nic{};        ///< wire: "mlx5_0:1", "all"

  // Its shape.
  Count ranks{}, nodes{}, tokens{}, hidden{}, topk{}, experts{};
  Count groups{};  ///< nodes that a token's experts may be on; 0: all
  Count bytes{};   ///< of a message

  // How it was done.
  Count sms{}, nvl_chunk{}, rdma_chunk{};
  Count warps{};  ///< of a block; empty: the library's default

  // What came out.
  Number median_us{}, min_us{}, max_us{}, mean_us{};
  Number wall_us{}, pipelined_us{}, host_us{};
  Number notify_us{};             ///< of a dispatch: what finding routes and exchanging counts takes besides
  Number gb_per_s{};              ///< as the benchmark's publishers count: see results/README.md
  Number rdma_gb_per_s{};         ///< the same for what goes by RDMA
  Number alg_gb_per_s{};          ///< nccl: bytes by time
  Number nvlink_wire_gb_per_s{};  ///< bytes that really cross between ranks of a node
  Number rdma_wire_gb_per_s{};    ///< bytes that really cross between nodes
  Number nominal_gb_per_s{};      ///< of the link

  Text status = "ok";  ///< "ok", "skipped", "failed"
  Text note{};         ///< why it was skipped or failed; what else is to be known
};

/// A column of the CSV files, in their order.
struct FigureColumn {
  const char* name;
  std::variant<Figure::Text Figure::*, Figure::Count Figure::*, Figure::Number Figure::*> member;
};
const std::vector<FigureColumn>& figure_columns();
/// nullptr: there is none of that name.
const FigureColumn* find_column(std::string_view name);

/// A field as text; empty where there is no value.
std::string field_text(const Figure& figure, const FigureColumn& column);
/// @throws InvalidArgument, without saying where, for a text that is no such value.
void set_field(Figure& figure, const FigureColumn& column, const std::string& text);
/// All fields that have a value, by the names of columns.
nlohmann::json figure_json(const Figure& figure);

/// The first line of a CSV file, and that of a measurement.
std::string figure_csv_header();
std::string figure_csv_line(const Figure& figure);

}  // namespace deep_ep::tools
