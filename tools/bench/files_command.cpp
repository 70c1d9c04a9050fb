// `deep_ep bench nccl-parse` and `deep_ep bench plot`: figures that were measured before.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/nccl_table.hpp"
#include "tools/bench/output/plot.hpp"
#include "tools/bench/output/report.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

struct NcclCommand {
  std::string file;
  NcclOptions parse;
  OutputOptions output;
};

nlohmann::json figure_json(const Figure& figure) {
  nlohmann::json json = nlohmann::json::object();
  for (const FigureColumn& column : figure_columns()) {
    const std::string text = field_text(figure, column);
    if (text.empty()) continue;
    const auto number = number_in(figure, column);
    json[column.name] = number ? nlohmann::json(*number) : nlohmann::json(text);
  }
  return json;
}

int run_nccl_parse(NcclCommand command) {
  const NcclReport parsed = parse_nccl_tests(read_text(command.file, "nccl-parse"),
                                             command.file == "-" ? "standard input" : command.file, command.parse);
  command.output.csv = !command.output.json;
  Report report(command.output, true);
  nlohmann::json document = {{"benchmark", "nccl"}, {"measurements", nlohmann::json::array()}};
  for (const Figure& figure : parsed.figures) {
    report.add(figure);
    document["measurements"].push_back(figure_json(figure));
  }
  const int status = report.finish(command.output.json ? &document : nullptr);
  if (command.output.json) print_json(document);
  for (const std::string& line : parsed.tables) fmt::print(stderr, "{}\n", line);
  for (const std::string& line : parsed.mistakes) fmt::print(stderr, "deep_ep: {}\n", line);
  return parsed.mistakes.empty() ? status : 1;
}

struct PlotCommand {
  std::vector<std::string> files;
  std::string svg;
  std::string over;
  std::vector<std::string> where;
};

/// "dtype=fp8"
bool fits(const Figure& figure, const std::string& where) {
  const std::size_t sign = where.find('=');
  const FigureColumn* column = find_column(where.substr(0, sign));
  if (sign == std::string::npos || column == nullptr) {
    throw InvalidArgument(fmt::format("--where {}: allowed: COLUMN=VALUE with a column of the CSV files", where));
  }
  return field_text(figure, *column) == where.substr(sign + 1);
}

int run_plot(const PlotCommand& command) {
  std::vector<Figure> figures;
  for (const std::string& file : command.files) {
    for (const Figure& figure : read_results(find_results(file).string()).figures) {
      bool wanted = true;
      for (const std::string& where : command.where) wanted = fits(figure, where) && wanted;
      if (wanted) figures.push_back(figure);
    }
  }
  const Chart chart = plot_bandwidth(figures, command.over);
  write_text(command.svg, to_svg(chart));
  fmt::print("{}: {} lines over {}\n", command.svg, chart.lines.size(), chart.x_label);
  return 0;
}

}  // namespace

void add_bench_nccl_parse(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("nccl-parse", "Read what nccl-tests printed, check it, and print it as CSV");
  auto options = std::make_shared<NcclCommand>();
  command->add_option("file", options->file, "The output of all_reduce_perf, say; - for standard input")->required();
  command->add_option("--ranks", options->parse.ranks, "Ranks, where the text does not list them")
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("--collective", options->parse.collective,
                      "all_reduce, all_gather, ..., where the text does not name it");
  command->add_flag("--allow-partial", options->parse.allow_partial, "Take a table without its last lines");
  add_output_options(*command, options->output);
  command->footer(
      "Exit status: 1 if data was wrong, bandwidths do not fit each other, or the table has no end; CSV is printed all "
      "the same.");
  command->callback([options, &action] { action = [options] { return run_nccl_parse(*options); }; });
}

void add_bench_plot(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("plot", "Draw the bandwidth in files of results, as SVG");
  auto options = std::make_shared<PlotCommand>();
  command->add_option("files", options->files, "CSV files, or results that come with the library")->required();
  command->add_option("--plot,--out", options->svg, "The SVG file to write")->required();
  add_plot_over_option(*command, options->over);
  command->add_option("--where", options->where, "COLUMN=VALUE: only such measurements; may be repeated")->take_all();
  command->callback([options, &action] { action = [options] { return run_plot(*options); }; });
}

}  // namespace deep_ep::tools
