// `deep_ep demo`: a text goes through a DeepSeek-V3-shaped Mixture-of-Experts layer, and the result is checked.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/json_output.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/variables.hpp"
#include "tools/demo/layer.hpp"

namespace deep_ep::tools {
namespace {

struct DemoOptions {
  std::string input = "README.md";
  std::string device = "auto";
  int ranks = 8;
  std::int64_t most_tokens = 0;
  ModelShape shape;
  bool json = false;
};

struct DemoReport {
  DemoOptions options;
  Device::Kind device = Device::Kind::cpu;
  std::size_t words = 0;
  std::size_t tokens = 0;
  double seconds = 0;
  const Reference* reference = nullptr;
  LayerResult result;
};

std::string read_text(const std::string& path) {
  if (std::filesystem::is_directory(path))
    throw InvalidArgument(fmt::format("--input {}: is a directory, a text file is needed", path));
  constexpr std::size_t kMost = std::size_t{64} << 20;  // a device may never end
  std::ifstream file(path, std::ios::binary);
  std::string text(kMost + 1, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size())) && !file.eof()) {
    throw InvalidArgument(fmt::format("--input {}: cannot read it: {}", path, std::strerror(errno)));
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMost) throw InvalidArgument(fmt::format("--input {}: is longer than 64 MiB", path));
  return text;
}

void check(const DemoOptions& options) {
  const ModelShape& shape = options.shape;
  if (shape.hidden % 16 != 0) {
    throw InvalidArgument(fmt::format("--hidden {}: 8-bit rows need a multiple of 16", shape.hidden));
  }
  if (shape.experts % options.ranks != 0) {
    throw InvalidArgument(
        fmt::format("--ranks {}: must divide the {} experts of the model", options.ranks, shape.experts));
  }
}

/// Rows of `text`, a share of all words for every rank: earlier ranks get one more if it does not divide evenly.
std::vector<Batch> share_out(const ModelShape& shape, std::span<const std::string> words, int ranks) {
  std::vector<Batch> batches(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::size_t begin = words.size() * r / batches.size();
    const std::size_t end = words.size() * (r + 1) / batches.size();
    batches[r] =
        make_batch(shape, words.subspan(begin, end - begin), begin == 0 ? std::string_view() : words[begin - 1]);
  });
  return batches;
}

std::vector<std::vector<std::int64_t>> row_matrix(const Reference& reference) {
  std::vector<std::vector<std::int64_t>> rows;
  for (int source = 0; source < reference.ranks(); ++source) {
    rows.emplace_back();
    for (int to = 0; to < reference.ranks(); ++to) rows.back().push_back(reference.count(source, to));
  }
  return rows;
}

/// Bytes a row has on the way: 16-bit channels, or 8-bit ones and a scale for every 128.
std::int64_t row_bytes(const ModelShape& shape, bool as_8bit) {
  return as_8bit ? shape.hidden + (shape.hidden + 127) / 128 * std::int64_t{sizeof(float)}
                 : std::int64_t{shape.hidden} * 2;
}

void print_as_json(const DemoReport& report) {
  const ModelShape& shape = report.options.shape;
  nlohmann::json times;
  for (int phase = 0; phase < static_cast<int>(Phase::count); ++phase) {
    times[name_of(static_cast<Phase>(phase))] = report.result.phase_seconds[static_cast<std::size_t>(phase)];
  }
  const nlohmann::json json = {
      {"input", report.options.input},
      {"device", name_of(report.device)},
      {"ranks", report.options.ranks},
      {"hidden", shape.hidden},
      {"experts", shape.experts},
      {"topk", shape.topk},
      {"words", report.words},
      {"tokens", report.tokens},
      {"expert_load", report.reference->expert_load()},
      {"rows", row_matrix(*report.reference)},
      {"row_bytes", {{"bf16", row_bytes(shape, false)}, {"8bit", row_bytes(shape, true)}}},
      {"seconds", times},
      {"total_seconds", report.seconds},
      {"largest_error", report.result.output.largest},
      {"largest_error_of_bound", report.result.output.largest_of_bound},
      {"failures", report.result.failures},
      {"correct", report.result.failures.empty()},
  };
  print_json(json);
}

void print_load(const std::vector<std::int64_t>& load) {
  const std::int64_t most = *std::max_element(load.begin(), load.end());
  std::int64_t total = 0;
  for (const std::int64_t count : load) total += count;
  const double average = static_cast<double>(total) / static_cast<double>(load.size());
  fmt::print("\nExpert load: {} (token, expert) pairs; average {:.1f}, busiest {} ({:.1f} times the average)\n", total,
             average, most, average > 0 ? static_cast<double>(most) / average : 0.0);
  // Experts by load: one line for every range of loads.
  constexpr std::int64_t kLines = 8;
  constexpr std::int64_t kBarWidth = 60;
  const std::int64_t width = most / kLines + 1;
  std::vector<std::int64_t> experts(static_cast<std::size_t>(kLines));
  for (const std::int64_t count : load) ++experts[static_cast<std::size_t>(count / width)];
  const std::int64_t highest = *std::max_element(experts.begin(), experts.end());
  for (std::int64_t line = 0; line < kLines; ++line) {
    const std::int64_t count = experts[static_cast<std::size_t>(line)];
    const auto bar = static_cast<std::size_t>((count * kBarWidth + highest - 1) / highest);
    fmt::print("  {:>4}-{:<4} tokens {:>4} experts {}\n", line * width, (line + 1) * width - 1, count,
               std::string(bar, '#'));
  }
}

void print_matrix(const DemoReport& report) {
  const auto rows = row_matrix(*report.reference);
  const ModelShape& shape = report.options.shape;
  std::int64_t total = 0;
  std::int64_t own = 0;
  fmt::print("\nRows sent (from rank, down; to rank, across)\n      ");
  for (std::size_t to = 0; to < rows.size(); ++to) fmt::print("{:>7}", to);
  fmt::print("\n");
  for (std::size_t from = 0; from < rows.size(); ++from) {
    fmt::print("  {:>3} ", from);
    for (const std::int64_t count : rows[from]) {
      fmt::print("{:>7}", count);
      total += count;
    }
    own += rows[from][from];
    fmt::print("\n");
  }
  const auto kib = [&](std::int64_t count, bool as_8bit) {
    return static_cast<double>(count * row_bytes(shape, as_8bit)) / 1024;
  };
  for (const bool as_8bit : {false, true}) {
    fmt::print("\nKiB sent as {} rows of {} bytes\n      ", as_8bit ? "8-bit" : "BF16", row_bytes(shape, as_8bit));
    for (std::size_t to = 0; to < rows.size(); ++to) fmt::print("{:>9}", to);
    fmt::print("\n");
    for (std::size_t from = 0; from < rows.size(); ++from) {
      fmt::print("  {:>3} ", from);
      for (const std::int64_t count : rows[from]) fmt::print("{:>9.1f}", kib(count, as_8bit));
      fmt::print("\n");
    }
  }
  fmt::print("\n{} rows for {} tokens ({:.2f} ranks per token); {} of them stay on their rank.\n", total, report.tokens,
             report.tokens > 0 ? static_cast<double>(total) / static_cast<double>(report.tokens) : 0.0, own);
  fmt::print("Between ranks: {:.1f} MiB as BF16, {:.1f} MiB as 8-bit rows with scales.\n",
             kib(total - own, false) / 1024, kib(total - own, true) / 1024);
}

void print_report(const DemoReport& report) {
  const ModelShape& shape = report.options.shape;
  const LayerResult& result = report.result;
  print_load(report.reference->expert_load());
  print_matrix(report);
  fmt::print("\nTime of the slowest rank{}\n",
             report.device == Device::Kind::cpu ? " (kernels run on the CPU: not a measure of speed)" : "");
  for (int phase = 0; phase < static_cast<int>(Phase::count); ++phase) {
    fmt::print("  {:<22}{:>12.3f} ms\n", name_of(static_cast<Phase>(phase)),
               result.phase_seconds[static_cast<std::size_t>(phase)] * 1e3);
  }
  fmt::print("  {:<22}{:>12.3f} s\n", "whole demo", report.seconds);
  for (const std::string& failure : result.failures) fmt::print("\nWrong: {}", failure);
  fmt::print("\nLargest error: {:.3g} ({:.0f} % of what rounding to BF16 may cost), {} output values\n",
             result.output.largest, result.output.largest_of_bound * 100,
             report.tokens * static_cast<std::size_t>(shape.hidden));
  fmt::print("{}\n", result.failures.empty() ? "OK: every row, weight and count is exact, every sum is right."
                                             : "FAILED: the result differs from the reference model.");
}

int run_demo(const DemoOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  check(options);
  check_environment();
  const std::string text = read_text(options.input);
  DemoReport report;
  report.options = options;
  report.device = choose_device(options.device, options.ranks);
  std::vector<std::string> words = split_words(text);
  if (words.empty()) throw InvalidArgument(fmt::format("--input {}: there is no word in it", options.input));
  report.words = words.size();
  // The CPU plays thousands of GPU threads: enough tokens to see the routing, few enough not to take long.
  const std::int64_t cap = options.most_tokens > 0               ? options.most_tokens
                           : report.device == Device::Kind::cuda ? 32768
                                                                 : 4096;
  if (words.size() > static_cast<std::size_t>(cap)) words.resize(static_cast<std::size_t>(cap));
  report.tokens = words.size();
  if (!options.json) {
    const ModelShape& shape = options.shape;
    fmt::print("{}: {} words, of which {} are used{}; {} ranks on {}\n", options.input, report.words, report.tokens,
               report.tokens < report.words ? fmt::format(" (at most {}: --tokens)", cap) : "", options.ranks,
               report.device == Device::Kind::cuda ? "a GPU each" : "the CPU");
    fmt::print(
        "Layer: hidden {}, {} experts in {} groups of which {} are used, top-{}, sigmoid gate, {} experts per rank\n",
        shape.hidden, shape.experts, shape.groups, shape.used_groups, shape.topk, shape.experts / options.ranks);
    std::fflush(stdout);
  }

  show_progress("embedding and routing");
  const std::vector<Batch> batches = share_out(options.shape, words, options.ranks);
  const Reference reference(options.shape, batches);
  report.reference = &reference;
  report.result = run_layer(options.shape, batches, reference, report.device);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  options.json ? print_as_json(report) : print_report(report);
  return report.result.failures.empty() ? 0 : 1;
}

}  // namespace

void add_demo_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("demo", "Send a text through a Mixture-of-Experts layer and check the result");
  auto options = std::make_shared<DemoOptions>();
  command->add_option("--input", options->input, "Text file whose words are the tokens")->capture_default_str();
  add_ranks_option(*command, options->ranks, "Ranks, threads of this process")->capture_default_str();
  command->add_option("--hidden", options->shape.hidden, "Channels of a token")
      ->check(CLI::Range(16, 32768))
      ->capture_default_str();
  command->add_option("--tokens", options->most_tokens, "Use at most so many words (default 4096; 32768 on GPUs)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  add_device_option(*command, options->device);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return run_demo(*options); }; });
}

}  // namespace deep_ep::tools
