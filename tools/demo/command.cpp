// `deep_ep demo`: a text goes through a Mixture-of-Experts layer, and the result is checked.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/support/format.hpp"
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

void print_rows(const ModelShape& shape, const oracle::Dispatched& routes, std::size_t tokens) {
  std::vector<int> load;  // tokens of each expert
  std::vector<std::vector<std::int64_t>> rows(routes.received.size());
  for (auto& from : rows) from.resize(rows.size());
  for (std::size_t to = 0; to < rows.size(); ++to) {
    const oracle::Received& received = routes.received[to];
    load.insert(load.end(), received.tokens_per_expert.begin(), received.tokens_per_expert.end());
    for (const std::int32_t from : received.src_rank) ++rows[static_cast<std::size_t>(from)][to];
  }
  fmt::print("\nTokens of an expert: {:.1f} on average, the busiest has {}\n",
             static_cast<double>(std::accumulate(load.begin(), load.end(), 0)) / static_cast<double>(load.size()),
             *std::ranges::max_element(load));
  fmt::print("\nRows sent (from rank, down; to rank, across)\n      ");
  for (std::size_t to = 0; to < rows.size(); ++to) fmt::print("{:>7}", to);
  std::int64_t total = 0;
  std::int64_t own = 0;
  for (std::size_t from = 0; from < rows.size(); ++from) {
    fmt::print("\n  {:>3} {:>7}", from, fmt::join(rows[from], ""));
    total += std::accumulate(rows[from].begin(), rows[from].end(), std::int64_t{0});
    own += rows[from][from];
  }
  fmt::print("\n{} rows for {} tokens, {} of them on their own rank. Between ranks: {:.1f} MiB of BF16 rows.\n", total,
             tokens, own, static_cast<double>((total - own) * 2 * shape.hidden) / (1 << 20));
}

int run_demo(const DemoOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  check(options);
  check_environment();
  const Device::Kind device = choose_device(options.device, options.ranks);
  std::vector<std::string> words = split_words(read_text(options.input));
  if (words.empty()) fail<InvalidArgument>("--input {}: there is no word in it", options.input);
  const std::size_t all = words.size();
  // The CPU plays thousands of GPU threads: enough tokens to see the routing, few enough not to take long.
  const std::int64_t cap = options.most_tokens > 0 ? options.most_tokens : device == Device::Kind::cuda ? 32768 : 4096;
  words.resize(std::min(all, static_cast<std::size_t>(cap)));
  const ModelShape& shape = options.shape;
  fmt::print("{}: {} words, of which {} are used{}; {} ranks on {}\n",
             options.input.empty() ? "the demo's own text" : options.input, all, words.size(),
             words.size() < all ? fmt::format(" (at most {}: --tokens)", cap) : "", options.ranks,
             device == Device::Kind::cuda ? "a GPU each" : "the CPU");
  fmt::print("Layer: hidden {}, {} experts, top-{}, {} experts per rank\n", shape.hidden, shape.experts, shape.topk,
             shape.experts / options.ranks);
  std::fflush(stdout);

  std::vector<Batch> batches(static_cast<std::size_t>(options.ranks));
  run_ranks(options.ranks, [&](int rank) {  // earlier ranks get one word less if they do not divide evenly
    const auto at = static_cast<std::size_t>(rank);
    batches[at] =
        make_batch(shape, words, words.size() * at / batches.size(), words.size() * (at + 1) / batches.size());
  });
  const oracle::Dispatched routes = routes_of(shape, batches);
  print_rows(shape, routes, words.size());
  std::fflush(stdout);
  const double error = run_layer(shape, batches, routes, device);
  fmt::print(
      "\nOK: every row, weight and count is exact. Of {} sums the worst is off by {:.0f} % of what rounding to BF16 "
      "may "
      "cost. ({:.1f} s)\n",
      words.size() * static_cast<std::size_t>(shape.hidden), error * 100,
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
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
