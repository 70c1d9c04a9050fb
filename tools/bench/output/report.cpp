#include "tools/bench/output/report.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "deep_ep/error.hpp"
#include "tools/bench/output/compare.hpp"
#include "tools/bench/output/plot.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

void add_plot_over_option(CLI::App& command, std::string& over) {
  command
      .add_option("--plot-over", over,
                  fmt::format("What the plot goes over: {} (default: the first with several values)",
                              fmt::join(plot_axes(), ", ")))
      ->check(CLI::IsMember(plot_axes()));
}

void add_output_options(CLI::App& command, OutputOptions& options) {
  CLI::Option* json = command.add_flag("--json", options.json, "Print JSON");
  command.add_flag("--csv", options.csv, "Print CSV: a line of column names, then one for each measurement")
      ->excludes(json);
  CLI::Option* compare =
      command.add_option("--compare", options.compare,
                         "Also print these figures beside those of FILE.csv, or of results that come with the library "
                         "(seed-b200): only what has the same shape");
  command
      .add_option("--fail-below", options.fail_below,
                  "With --compare: exit with 1 where a ratio is below this; 1 = as fast as there")
      ->check(CLI::PositiveNumber)
      ->needs(compare);
  command.add_option("--plot", options.plot, "Also draw the bandwidth, as this SVG file");
  add_plot_over_option(command, options.plot_over);
  command.add_flag("--progress", options.progress,
                   "Say on stderr what is being measured, also where that is no terminal");
}

Report::Report(const OutputOptions& options, bool speaks) : options_(options), speaks_(speaks) {
  always_show_progress(options.progress && speaks);
  if (!options.compare.empty()) {
    reference_ = read_results(find_results(options.compare).string());
    reference_->name = options.compare;
  }
  if (speaks && options.csv) fmt::print("{}", figure_csv_header());
}

void Report::add(const Figure& figure) {
  figures_.push_back(figure);
  if (!speaks_ || options_.text()) return;  // a table shows what has been measured
  clear_progress();
  if (options_.csv) {
    fmt::print("{}", figure_csv_line(figure));
    std::fflush(stdout);
  }
  show_progress(fmt::format("measured: {} {} {}{}", figure.operation, figure.dtype, figure.mode,
                            figure.tokens ? fmt::format(", {} tokens", *figure.tokens) : ""));
}

int Report::finish_comparison(nlohmann::json* document) {
  const Comparison comparison = compare(figures_, *reference_);
  if (document != nullptr) {
    (*document)["comparison"] = comparison.json();
  } else {
    // CSV goes on where a program reads it, without people's tables between.
    fmt::print(options_.csv ? stderr : stdout, "{}", comparison.text());
  }
  if (comparison.figures.empty()) return 1;
  if (!options_.fail_below || comparison.worst_ratio() >= *options_.fail_below) return 0;
  fmt::print(stderr, "deep_ep: --fail-below {:g}: the least ratio is {:.3g}\n", *options_.fail_below,
             comparison.worst_ratio());
  return 1;
}

int Report::finish(nlohmann::json* document) {
  if (!speaks_) return 0;
  clear_progress();
  if (!options_.plot.empty()) write_text(options_.plot, to_svg(plot_bandwidth(figures_, options_.plot_over)));
  return reference_ ? finish_comparison(document) : 0;
}

}  // namespace deep_ep::tools
