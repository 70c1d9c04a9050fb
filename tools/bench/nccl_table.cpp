#include "tools/bench/nccl_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <regex>
#include <sstream>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

constexpr const char* kNotThere = "N/A";

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

/// Where in the text something stands, for messages.
struct NcclPlace {
  const std::string& name;
  int line;
  std::string text() const { return fmt::format("{} line {}", name, line); }
};

std::optional<double> number_of(const std::string& word, const NcclPlace& place, const char* column) {
  if (word == kNotThere) return std::nullopt;
  double value = 0;
  const char* const end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  if (error != std::errc{} || stop != end || !std::isfinite(value) || value < 0) {
    throw InvalidArgument(fmt::format("{}: {} is '{}', expected a number", place.text(), column, word));
  }
  return value;
}

/// Four columns: time, algbw, busbw, #wrong.
struct NcclHalf {
  std::optional<double> time, algbw, busbw, wrong;
};

struct NcclRow {
  int line;
  std::int64_t bytes;
  std::string type, redop;
  NcclHalf out_of_place, in_place;
};

struct NcclTable {
  int line = 0;  ///< of its head
  std::string collective;
  int ranks = 0;  ///< 0: not known
  std::vector<NcclRow> rows{};
  std::optional<double> average{};
  bool out_of_bounds = false;
};

class NcclParser {
 public:
  static constexpr std::size_t kLongestLine = 4096;

  NcclParser(const std::string& name, const NcclOptions& options) : name_(name), options_(options) {}

  std::vector<NcclTable> parse(const std::string& text) {
    std::istringstream in(text);
    int number = 0;
    for (std::string line; std::getline(in, line);) {
      ++number;
      // No line of nccl-tests is so long, and std::regex takes stack for every character.
      if (line.size() <= kLongestLine) take(without_mark(line), {name_, number});
    }
    if (tables_.empty()) {
      throw InvalidArgument(
          fmt::format("{}: there is no table of nccl-tests in its {} lines (its head begins with "
                      "'# size count type')",
                      name_, number));
    }
    return std::move(tables_);
  }

 private:
  /// Without what mpirun --tag-output puts in front: "[1,0]<stdout>:".
  static std::string without_mark(const std::string& line) {
    static const std::regex mark(R"(^\[[0-9]+(,[0-9]+)?\](<std(out|err)>)?:?)");
    return std::regex_replace(line, mark, "", std::regex_constants::format_first_only);
  }

  void take(const std::string& line, const NcclPlace& place) {
    static const std::regex head(R"(^\s*#\s*size\s+count\s+type\b)");
    static const std::regex program(R"(\b([a-z_]+)_perf\b)");
    static const std::regex rank(R"(^\s*#\s+Rank\s+[0-9]+\b)");
    std::smatch found;
    if (std::regex_search(line, head)) return begin_table(place);
    if (std::regex_search(line, found, program)) collective_ = found[1];
    if (std::regex_search(line, rank)) ++ranks_;
    if (!inside_) return;
    if (line.find(" NCCL ") != std::string::npos) return;  // INFO, WARN
    const std::vector<std::string> words = words_of(line);
    if (words.empty()) return;
    words.front().starts_with('#') ? take_comment(line, place) : take_row(line, words, place);
  }

  void begin_table(const NcclPlace& place) {
    NcclTable table{.line = place.line, .collective = options_.collective, .ranks = options_.ranks};
    if (table.collective.empty()) table.collective = collective_.empty() ? "all_reduce" : collective_;
    if (table.ranks == 0) table.ranks = ranks_;
    tables_.push_back(table);
    inside_ = true;
    ranks_ = 0;
  }

  void take_comment(const std::string& line, const NcclPlace& place) {
    static const std::regex average(R"(Avg bus bandwidth\s*:\s*(\S+))");
    std::smatch found;
    if (line.find("Out of bounds") != std::string::npos) {
      tables_.back().out_of_bounds = line.find("OK") == std::string::npos;
    } else if (std::regex_search(line, found, average)) {
      tables_.back().average = number_of(found[1], place, "the average bus bandwidth");
      inside_ = false;
    }
  }

  void take_row(const std::string& line, const std::vector<std::string>& words, const NcclPlace& place) {
    constexpr std::size_t kColumns = 13;
    if (!cut_row_.empty()) throw InvalidArgument(cut_row_);
    if (words.size() != kColumns) {
      cut_row_ = fmt::format("{}: '{}' is no row of nccl-tests' table: {} columns, expected {}", place.text(),
                             line.substr(0, 60), words.size(), kColumns);
      // The last row of a text that was cut: nothing may come behind it.
      if (options_.allow_partial && words.size() < kColumns) return;
      throw InvalidArgument(cut_row_);
    }
    const auto half = [&](std::size_t at) {
      return NcclHalf{number_of(words[at], place, "time"), number_of(words[at + 1], place, "algbw"),
                      number_of(words[at + 2], place, "busbw"), number_of(words[at + 3], place, "#wrong")};
    };
    const double bytes = number_of(words[0], place, "size").value_or(0);
    tables_.back().rows.push_back({place.line, static_cast<std::int64_t>(bytes), words[2], words[3], half(5), half(9)});
  }

  const std::string& name_;
  const NcclOptions& options_;
  std::vector<NcclTable> tables_;
  std::string cut_row_;  ///< what is wrong with a row that may have been cut off
  bool inside_ = false;
  std::string collective_;
  int ranks_ = 0;
};

/// How many ranks would have that ratio of the two bandwidths: where they are largest, rounding matters least.
int ranks_by_bandwidth(const NcclTable& table) {
  const NcclHalf* best = nullptr;
  for (const NcclRow& row : table.rows) {
    if (row.out_of_place.algbw && row.out_of_place.busbw &&
        (best == nullptr || *row.out_of_place.algbw > *best->algbw)) {
      best = &row.out_of_place;
    }
  }
  if (best == nullptr || *best->algbw <= 0) return 0;
  const double ratio = *best->busbw / *best->algbw;
  const double limit = bus_factor(table.collective, 1 << 30);  // of infinitely many
  const double ranks = ratio < limit ? limit / (limit - ratio) : 0;
  constexpr double kMost = 1 << 20;
  return ranks >= 2 && ranks < kMost ? static_cast<int>(std::lround(ranks)) : 0;
}

class NcclJudge {
 public:
  NcclJudge(const std::string& name, const NcclOptions& options, NcclReport& report)
      : name_(name), options_(options), report_(report) {}

  void judge(NcclTable table) {
    const bool counted = table.ranks != 0;
    const bool has_ratio = bus_factor(table.collective, 2) != bus_factor(table.collective, 4);
    if (!counted && has_ratio) table.ranks = ranks_by_bandwidth(table);
    if (table.rows.empty()) {
      report_.mistakes.push_back(fmt::format("{} line {}: the table has no rows", name_, table.line));
      return;
    }
    double sum = 0;
    int count = 0;
    double largest = 0;
    for (const NcclRow& row : table.rows) {
      for (const bool in_place : {false, true}) {
        const NcclHalf& half = in_place ? row.in_place : row.out_of_place;
        if (!half.busbw || !half.algbw) continue;
        judge_half(table, row, half, in_place ? "in place" : "out of place");
        sum += *half.busbw;
        ++count;
        largest = std::max(largest, *half.busbw);
      }
    }
    judge_end(table, count == 0 ? 0 : sum / count);
    report_.tables.push_back(fmt::format(
        "{}: {} of {} ranks{}, {} sizes; bus bandwidth at most {:.2f} GB/s, average {}; {}", name_, table.collective,
        table.ranks == 0 ? "?" : fmt::format("{}", table.ranks), counted || !has_ratio ? "" : " (by the bandwidths)",
        table.rows.size(), largest, table.average ? fmt::format("{:g} GB/s", *table.average) : "not there",
        checked_ ? "data checked" : "data not checked (#wrong is N/A)"));
  }

 private:
  void judge_half(const NcclTable& table, const NcclRow& row, const NcclHalf& half, const char* place) {
    checked_ = checked_ || half.wrong.has_value();
    if (half.wrong.value_or(0) != 0) {
      report_.mistakes.push_back(fmt::format("{} line {}: {} wrong values {}", name_, row.line, *half.wrong, place));
    }
    const double factor = table.ranks == 0 ? 0 : bus_factor(table.collective, table.ranks);
    // Both are printed with two digits behind the point.
    const double tolerance = 0.01 * *half.busbw + 0.006 * (1 + factor);
    if (factor != 0 && std::abs(*half.busbw - *half.algbw * factor) > tolerance) {
      report_.mistakes.push_back(
          fmt::format("{} line {}: busbw {} {} does not fit algbw {}: {} of {} ranks has {:.4g} times that "
                      "(--collective, --ranks?)",
                      name_, row.line, *half.busbw, place, *half.algbw, table.collective, table.ranks, factor));
    }
    Figure figure;
    figure.benchmark = "nccl";
    figure.operation = table.collective;
    figure.dtype = row.type;
    figure.mode = place;
    figure.part = row.redop == "none" ? "-" : row.redop;
    figure.by = "NCCL";
    figure.device = "cuda";
    if (table.ranks != 0) figure.ranks = table.ranks;
    figure.bytes = row.bytes;
    figure.mean_us = half.time;
    figure.gb_per_s = half.busbw;
    figure.alg_gb_per_s = half.algbw;
    if (!half.wrong) figure.note = "data not checked";
    report_.figures.push_back(figure);
  }

  void judge_end(const NcclTable& table, double mean) {
    if (table.out_of_bounds) {
      report_.mistakes.push_back(fmt::format("{}: nccl-tests itself reports values out of bounds", name_));
    }
    constexpr double kTolerance = 0.02;
    if (!table.average) {
      if (options_.allow_partial) return;
      report_.mistakes.push_back(
          fmt::format("{}: the table that begins at line {} has no line '# Avg bus bandwidth': the run was cut short, "
                      "or the text is "
                      "(--allow-partial takes it)",
                      name_, table.line));
    } else if (std::abs(*table.average - mean) > kTolerance * mean + 0.01) {
      report_.mistakes.push_back(
          fmt::format("{}: the average bus bandwidth is {:g} there, but {:.4g} of the {} rows: "
                      "rows are missing",
                      name_, *table.average, mean, table.rows.size()));
    }
  }

  const std::string& name_;
  const NcclOptions& options_;
  NcclReport& report_;
  bool checked_ = false;
};

}  // namespace

double bus_factor(const std::string& collective, int ranks) {
  const double n = ranks;
  if (collective == "all_reduce") return 2 * (n - 1) / n;
  for (const char* one : {"all_gather", "reduce_scatter", "alltoall", "gather", "scatter"}) {
    if (collective == one) return (n - 1) / n;
  }
  for (const char* one : {"broadcast", "reduce", "sendrecv", "hypercube"}) {
    if (collective == one) return 1;
  }
  throw InvalidArgument(fmt::format(
      "--collective {}: allowed: all_reduce, all_gather, reduce_scatter, alltoall, gather, scatter, broadcast, reduce, "
      "sendrecv, hypercube",
      collective));
}

NcclReport parse_nccl_tests(const std::string& text, const std::string& name, const NcclOptions& options) {
  NcclReport report;
  for (NcclTable& table : NcclParser(name, options).parse(text))
    NcclJudge(name, options, report).judge(std::move(table));
  return report;
}

}  // namespace deep_ep::tools
