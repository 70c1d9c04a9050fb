#include "tools/bench/sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <sstream>

#include "bench_support/workload.hpp"
#include "deep_ep/error.hpp"
#include "tools/bench/output/csv.hpp"
#include "tools/bench/output/results.hpp"
#include "tools/common/child.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/version.hpp"

namespace deep_ep::tools {
namespace {

std::string new_file(const SweepOptions& options) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char date[16];
  std::strftime(date, sizeof date, "%Y-%m-%d", &utc);
  return fmt::format(
             "# source: deep_ep bench sweep\n# date: {}\n# hardware: {}\n# software: deep_ep {}\n# command: deep_ep "
             "bench "
             "sweep, device {}\n# gb_per_s: as DeepEP's tests count, see docs/benchmarks.md\n",
             date,
             options.device == "cpu" || cuda_device_count() == 0 ? "CPU, not a measure of speed" : "GPUs of this host",
             full_version(), options.device) +
         figure_csv_header();
}

std::vector<std::string> command_for(const SweepOptions& options, const SweepCell& cell) {
  std::vector<std::string> words;
  std::istringstream launcher(options.launcher);
  for (std::string word; launcher >> word;) words.push_back(word);
  const auto add = [&](const std::string& name, const auto& value) {
    words.push_back("--" + name);
    words.push_back(fmt::format("{}", value));
  };
  words.insert(words.end(), {own_program(), "bench", cell.benchmark, "--csv"});
  add("device", options.device);
  add("ranks", cell.ranks);
  add("tokens", cell.tokens);
  add("hidden", cell.hidden);
  add("topk", cell.topk);
  add("experts", cell.experts);
  if (cell.benchmark == "internode") {
    add("nodes", cell.nodes);
    add("groups", cell.groups);
  }
  words.insert(words.end(), options.more.begin(), options.more.end());
  return words;
}

std::string line_for(const SweepCell& cell, const char* status, const std::string& why) {
  Figure figure = cell.figure();
  figure.status = status;
  figure.note = why;
  return figure_csv_line(figure);
}

/// The lines of a run's output, for the file; throws where they are none.
std::string lines_of(const std::string& output) {
  std::string lines;
  for (const Figure& figure : parse_results(output, "the benchmark's output").figures) lines += figure_csv_line(figure);
  if (lines.empty()) throw InvalidArgument("the benchmark printed no measurement");
  return lines;
}

}  // namespace

Figure SweepCell::figure() const {
  Figure figure;
  figure.benchmark = benchmark;
  figure.by = "deep_ep";
  figure.ranks = ranks;
  figure.nodes = nodes;
  figure.tokens = tokens;
  figure.hidden = hidden;
  figure.topk = topk;
  figure.experts = experts;
  figure.groups = groups;
  return figure;
}

std::string SweepCell::text() const {
  return fmt::format("{}: {} tokens, hidden {}, top-{} of {} experts{}", benchmark, tokens, hidden, topk, experts,
                     groups == 0 ? "" : fmt::format(" on {} of {} nodes", groups, nodes));
}

SweepCell cell_of(const Figure& figure) {
  return {figure.benchmark,          figure.ranks.value_or(0), figure.nodes.value_or(0),   figure.tokens.value_or(0),
          figure.hidden.value_or(0), figure.topk.value_or(0),  figure.experts.value_or(0), figure.groups.value_or(0)};
}

std::vector<SweepCell> cells_of(const SweepOptions& options) {
  std::vector<SweepCell> cells;
  for (const std::string& mode : options.modes) {
    const bool between_nodes = mode == "internode";
    const int nodes = between_nodes ? options.nodes : 1;
    for (const int hidden : options.hidden) {
      for (const int topk : options.topk) {
        for (const int experts : options.experts_per_node) {
          for (const int groups : between_nodes ? options.groups : std::vector<int>{0}) {
            for (const std::int64_t tokens : options.tokens) {
              cells.push_back({mode, options.ranks, nodes, tokens, hidden, topk, experts * nodes, groups});
            }
          }
        }
      }
    }
  }
  return cells;
}

std::string why_impossible(const SweepCell& cell) {
  try {
    check_workload(static_cast<int>(cell.ranks), static_cast<int>(cell.topk), static_cast<int>(cell.experts));
    check_nodes(static_cast<int>(cell.ranks), static_cast<int>(cell.topk), static_cast<int>(cell.experts),
                static_cast<int>(cell.nodes), static_cast<int>(cell.groups));
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

SweepFile resume_sweep(const std::string& text, const std::string& name, const std::string& device) {
  SweepFile file;
  std::string whole = text;
  const bool torn = !text.empty() && text.back() != '\n';
  if (torn) whole.resize(text.find_last_of('\n') == std::string::npos ? 0 : text.find_last_of('\n') + 1);
  ResultFile results = parse_results(whole, name);
  // A copy that was cut short, or a full disk: the last shape's lines may not all be there.
  if (torn && !results.figures.empty()) {
    const SweepCell last = cell_of(results.figures.back());
    std::erase_if(results.figures, [&](const Figure& figure) { return cell_of(figure) == last; });
  }
  const std::size_t failed = std::erase_if(results.figures, [](const Figure& one) { return one.status == "failed"; });
  file.repaired = torn || failed > 0;
  for (const std::string& comment : parse_csv(whole, name).comments) file.text += '#' + comment + '\n';
  file.text += figure_csv_header();
  for (const Figure& figure : results.figures) {
    file.text += figure_csv_line(figure);
    const SweepCell cell = cell_of(figure);
    if (!figure.device.empty() && figure.device != device) continue;
    if (std::ranges::find(file.done, cell) == file.done.end()) file.done.push_back(cell);
  }
  return file;
}

SweepCounts run_sweep(const SweepOptions& options) {
  SweepFile before;
  if (std::filesystem::exists(options.file)) {
    const bool on_cpu = options.device == "cpu" || (options.device == "auto" && cuda_device_count() == 0);
    before = resume_sweep(read_text(options.file, "--out"), options.file, on_cpu ? "cpu" : "cuda");
  } else {
    before.text = new_file(options);
  }
  // The whole file each time, beside the old one: whenever this program is killed, there are whole shapes in it.
  std::string text = before.text;
  const auto append = [&](const std::string& lines) { write_text(options.file, text += lines); };
  append("");
  SweepCounts counts;
  const std::vector<SweepCell> cells = cells_of(options);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const SweepCell& cell = cells[i];
    if (std::ranges::find(before.done, cell) != before.done.end()) {
      ++counts.there;
      continue;
    }
    if (const std::string why = why_impossible(cell); !why.empty()) {
      append(line_for(cell, "skipped", why));
      ++counts.impossible;
      continue;
    }
    show_progress(fmt::format("[{}/{}] {}", i + 1, cells.size(), cell.text()));
    const ChildResult result = run_children({{.words = command_for(options, cell)}}, options.seconds).front();
    try {
      if (!result.well()) throw Error(result.reason());
      append(lines_of(result.output));
      ++counts.measured;
    } catch (const SystemError&) {
      throw;
    } catch (const Error& error) {
      append(line_for(cell, "failed", error.what()));
      ++counts.failed;
    }
  }
  clear_progress();
  return counts;
}

}  // namespace deep_ep::tools
