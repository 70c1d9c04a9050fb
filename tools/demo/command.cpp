// `deep_ep demo`: a text goes through a DeepSeek-V3-shaped Mixture-of-Experts layer, and the result is checked.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <span>
#include <string>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "oracle/bf16.hpp"
#include "tools/commands.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/variables.hpp"
#include "tools/demo/layer.hpp"
#include "tools/demo/text.hpp"

namespace deep_ep::tools {
namespace {

struct DemoOptions {
  std::string input;  ///< empty: a text of our own
  std::string device = "auto";
  int ranks = 8;
  std::int64_t most_tokens = 0;
  ModelShape shape;
};

struct DemoReport {
  DemoOptions options;
  Device::Kind device = Device::Kind::cpu;
  std::size_t words = 0;          ///< of the text
  std::vector<std::string> used;  ///< tokens
  std::vector<Batch> batches;     ///< of each rank
  oracle::Dispatched routes;
  TokenPlace followed;
  double seconds = 0;
  LayerResult result;

  int ranks() const { return options.ranks; }
  const char* input() const { return options.input.empty() ? "the demo's own text" : options.input.c_str(); }
  std::size_t first_token(int rank) const {
    return used.size() * static_cast<std::size_t>(rank) / static_cast<std::size_t>(ranks());
  }
};

std::string read_text(const std::string& path) {
  if (path.empty()) return kDemoText;
  if (std::filesystem::is_directory(path))
    fail<InvalidArgument>("--input {}: is a directory, a text file is needed", path);
  constexpr std::size_t kMost = std::size_t{64} << 20;  // a device may never end
  std::ifstream file(path, std::ios::binary);
  std::string text(kMost + 1, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size())) && !file.eof()) {
    fail<InvalidArgument>("--input {}: cannot read it: {}", path, std::strerror(errno));
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMost) fail<InvalidArgument>("--input {}: is longer than 64 MiB", path);
  return text;
}

void check(const DemoOptions& options) {
  const ModelShape& shape = options.shape;
  constexpr int kMultiple = 8;  // rows are of a multiple of 16 bytes
  if (shape.hidden % kMultiple != 0) {
    fail<InvalidArgument>("--hidden {}: must be a multiple of {}", shape.hidden, kMultiple);
  }
  if (shape.experts % options.ranks != 0) {
    fail<InvalidArgument>("--ranks {}: must divide the {} experts of the model", options.ranks, shape.experts);
  }
}

/// A share of the words for every rank: earlier ranks get one less if they do not divide evenly.
void share_out(DemoReport& report) {
  const std::span<const std::string> words = report.used;
  report.batches.resize(static_cast<std::size_t>(report.ranks()));
  run_ranks(report.ranks(), [&](int rank) {
    const std::size_t begin = report.first_token(rank);
    const std::size_t end = report.first_token(rank + 1);
    report.batches[static_cast<std::size_t>(rank)] =
        make_batch(report.options.shape, words.subspan(begin, end - begin),
                   begin == 0 ? std::string_view() : std::string_view(words[begin - 1]));
  });
}

/// A word that many ranks get, and that looks like one.
TokenPlace choose_followed(const DemoReport& report) {
  const auto ranks = static_cast<std::size_t>(report.ranks());
  TokenPlace best;
  std::size_t best_score = 0;
  for (int rank = 0; rank < report.ranks(); ++rank) {
    const std::span<const std::int32_t> rows = report.routes.destination_row[static_cast<std::size_t>(rank)];
    for (std::size_t token = 0; token * ranks < rows.size(); ++token) {
      const std::string& word = report.used[report.first_token(rank) + token];
      constexpr std::size_t kLikeAWord = 6;
      const bool is_word =
          word.size() >= kLikeAWord && std::ranges::all_of(word, [](unsigned char c) { return std::isalpha(c); });
      const auto missed = static_cast<std::size_t>(std::ranges::count(rows.subspan(token * ranks, ranks), -1));
      const std::size_t score = 1 + ranks - missed + (is_word ? ranks : 0);
      if (score <= best_score) continue;
      best_score = score;
      best = {rank, static_cast<std::int64_t>(token)};
    }
  }
  return best;
}

std::vector<std::vector<std::int64_t>> row_matrix(const DemoReport& report) {
  std::vector<std::vector<std::int64_t>> rows(static_cast<std::size_t>(report.ranks()));
  for (auto& from : rows) from.resize(rows.size());
  for (std::size_t to = 0; to < rows.size(); ++to) {
    for (const std::int32_t from : report.routes.received[to].src_rank) ++rows[static_cast<std::size_t>(from)][to];
  }
  return rows;
}

/// (token, expert) pairs of each expert.
std::vector<std::int64_t> expert_load(const DemoReport& report) {
  std::vector<std::int64_t> load;
  for (const oracle::Received& one : report.routes.received) {
    load.insert(load.end(), one.tokens_per_expert.begin(), one.tokens_per_expert.end());
  }
  return load;
}

/// From its rank to its experts and back.
void print_way(const DemoReport& report) {
  const auto [rank, token] = report.followed;
  const Batch& batch = report.batches[static_cast<std::size_t>(rank)];
  const std::string& word = report.used[report.first_token(rank) + static_cast<std::size_t>(token)];
  const auto at = static_cast<std::size_t>(token * report.options.shape.hidden);
  fmt::print("\nThe way of one word: \"{}\" is token {} of rank {}. The first number of its row is {:.4f}.\n", word,
             token, rank, oracle::bf16_value(batch.x[at]));
  fmt::print("  {:>7} {:>8} {:>9} {:>10}  {}\n", "to rank", "its row", "arrives", "goes back",
             "experts there (weight)");
  std::string sum;
  for (std::size_t to = 0; to < report.result.visits.size(); ++to) {
    if (!report.result.visits[to]) continue;
    const TokenVisit& visit = *report.result.visits[to];
    std::string experts;
    for (const auto& [expert, weight] : visit.experts) experts += fmt::format(" {} ({:.2f})", expert, weight);
    fmt::print("  {:>7} {:>8} {:>9.4f} {:>10.4f} {}\n", to, visit.row, visit.arrived, visit.sent_back, experts);
    sum += fmt::format("{}{:.4f}",
                       sum.empty()           ? ""
                       : visit.sent_back < 0 ? " - "
                                             : " + ",
                       sum.empty() ? visit.sent_back : std::fabs(visit.sent_back));
  }
  fmt::print("  (A rank sends back the sum of what its experts make of the number, each times its weight.)\n");
  fmt::print("  back on rank {}: {} = {:.4f}\n", rank, sum, report.result.came_home);
}

void print_load(const std::vector<std::int64_t>& load) {
  const std::int64_t most = *std::ranges::max_element(load);
  const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  const double average = static_cast<double>(total) / static_cast<double>(load.size());
  fmt::print("\nTokens of an expert: {:.1f} on average, the busiest has {} ({:.1f} times as many)\n", average, most,
             average > 0 ? static_cast<double>(most) / average : 0.0);
}

void print_rows(const DemoReport& report) {
  const auto rows = row_matrix(report);
  std::int64_t total = 0;
  std::int64_t own = 0;
  fmt::print("\nRows sent (from rank, down; to rank, across)\n      ");
  for (std::size_t to = 0; to < rows.size(); ++to) fmt::print("{:>7}", to);
  for (std::size_t from = 0; from < rows.size(); ++from) {
    fmt::print("\n  {:>3} ", from);
    for (const std::int64_t count : rows[from]) fmt::print("{:>7}", count);
    total += std::accumulate(rows[from].begin(), rows[from].end(), std::int64_t{0});
    own += rows[from][from];
  }
  fmt::print("\n{} rows for {} tokens, {} of them on their own rank. Between ranks: {:.1f} MiB of BF16 rows.\n", total,
             report.used.size(), own, static_cast<double>((total - own) * 2 * report.options.shape.hidden) / (1 << 20));
}

void print_report(const DemoReport& report) {
  const LayerResult& result = report.result;
  print_way(report);
  print_load(expert_load(report));
  print_rows(report);
  fmt::print("\nTime of the slowest rank{}\n",
             report.device == Device::Kind::cpu ? " (kernels run on the CPU: not a measure of speed)" : "");
  for (std::size_t phase = 0; phase < kPhases.size(); ++phase) {
    fmt::print("  {:<22}{:>12.3f} ms\n", kPhases[phase], result.phase_seconds[phase] * 1e3);
  }
  fmt::print("  {:<22}{:>12.3f} s\n", "whole demo", report.seconds);
  fmt::print(
      "\nOK: every row, weight and count is exact. Of {} sums the worst is {:.3g} off, {:.0f} % of what rounding to "
      "BF16 may cost.\n",
      report.used.size() * static_cast<std::size_t>(report.options.shape.hidden), result.error.largest,
      result.error.largest_of_bound * 100);
}

int run_demo(const DemoOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  check(options);
  check_environment();
  const std::string text = read_text(options.input);
  DemoReport report;
  report.options = options;
  report.device = choose_device(options.device, options.ranks);
  report.used = split_words(text);
  if (report.used.empty()) fail<InvalidArgument>("--input {}: there is no word in it", options.input);
  report.words = report.used.size();
  // The CPU plays thousands of GPU threads: enough tokens to see the routing, few enough not to take long.
  const std::int64_t cap = options.most_tokens > 0               ? options.most_tokens
                           : report.device == Device::Kind::cuda ? 32768
                                                                 : 4096;
  report.used.resize(std::min(report.words, static_cast<std::size_t>(cap)));
  const ModelShape& shape = options.shape;
  fmt::print("{}: {} words, of which {} are used{}; {} ranks on {}\n", report.input(), report.words, report.used.size(),
             report.used.size() < report.words ? fmt::format(" (at most {}: --tokens)", cap) : "", options.ranks,
             report.device == Device::Kind::cuda ? "a GPU each" : "the CPU");
  fmt::print(
      "Layer: hidden {}, {} experts in {} groups of which {} are used, top-{}, sigmoid gate, {} experts per rank\n",
      shape.hidden, shape.experts, shape.groups, shape.used_groups, shape.topk, shape.experts / options.ranks);
  std::fflush(stdout);

  show_progress("embedding and routing");
  share_out(report);
  report.routes = routes_of(options.shape, report.batches);
  report.followed = choose_followed(report);
  report.result = run_layer(options.shape, report.batches, report.routes, report.followed, report.device);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print_report(report);
  return 0;
}

}  // namespace

void add_demo_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("demo", "Send a text through a Mixture-of-Experts layer and check the result");
  auto options = std::make_shared<DemoOptions>();
  command->add_option("--input", options->input, "Text file whose words are the tokens (default: a text of its own)");
  add_ranks_option(*command, options->ranks, "Ranks, threads of this process")->capture_default_str();
  add_number(*command, "--hidden", options->shape.hidden, 16, 32768, "Channels of a token")->capture_default_str();
  add_number(*command, "--tokens", options->most_tokens, std::int64_t{1}, std::int64_t{1} << 20,
             "Use at most so many words (default 4096; 32768 on GPUs)");
  add_device_option(*command, options->device);
  command->callback([options, &action] { action = [options] { return run_demo(*options); }; });
}

}  // namespace deep_ep::tools
