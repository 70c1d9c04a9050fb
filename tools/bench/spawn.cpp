// `deep_ep bench ... --spawn N`: the benchmark again, as N processes of this host that end together.
#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "tools/bench/benchmark.hpp"
#include "tools/common/child.hpp"

namespace deep_ep::tools {
namespace {

/// This process's command line without --spawn.
std::vector<std::string> words_of_a_rank() {
  std::vector<std::string> words = {own_program()};
  std::ifstream file("/proc/self/cmdline");
  std::string word;
  std::getline(file, word, '\0');
  while (std::getline(file, word, '\0')) {
    if (word == "--spawn") {
      std::getline(file, word, '\0');
    } else if (!word.starts_with("--spawn=")) {
      words.push_back(word);
    }
  }
  return words;
}

}  // namespace

int run_as_processes(int ranks) {
  const Place place = place_of_this_host(ranks);
  std::vector<ChildCommand> commands;
  for (int i = 0; i < ranks; ++i) commands.push_back({words_of_a_rank(), variables_of_rank(place, i, ranks)});
  // A signal that ends this process ends the ranks: see Children.
  Children children(commands, [](std::size_t, int stream, std::string_view text) {
    std::FILE* const out = stream == 0 ? stdout : stderr;
    std::fwrite(text.data(), 1, text.size(), out);
    std::fflush(out);
  });
  while (children.running() > 0 && !children.first_failure()) children.step();
  const auto failed = children.first_failure();
  if (!failed) return 0;
  const int status = *children.status(*failed);
  fmt::print(stderr, "deep_ep: rank {} ended with {}; the other ranks of this host are ended\n",
             place.node * ranks + static_cast<int>(*failed), describe_status(status));
  children.signal_all(SIGTERM);
  constexpr double kGrace = 5;  // seconds until SIGKILL
  const Deadline end(kGrace);
  while (children.running() > 0 && !end.expired()) children.step();
  return status;
}

}  // namespace deep_ep::tools
