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
std::vector<std::string> own_command() {
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

volatile std::sig_atomic_t ended_by = 0;

void note_signal(int signal) { ended_by = signal; }

}  // namespace

int run_as_processes(int ranks) {
  const Place place = place_of_this_host(ranks);
  std::vector<ChildCommand> commands;
  for (int i = 0; i < ranks; ++i) commands.push_back({command_of_rank(place, i, ranks, own_command())});
  // A signal ends the ranks, and then this process: as the first process of a container it would ignore it otherwise.
  // (One that cannot be caught ends the ranks, too: see Children.)
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) std::signal(signal, note_signal);
  Children children(commands);
  while (children.running() > 0 && !children.first_failure() && ended_by == 0) children.step();
  const int signal = ended_by;
  const auto failed = children.first_failure();
  if (signal == 0 && !failed) return 0;
  const int status = signal != 0 ? 128 + signal : *children.status(*failed);
  if (signal == 0) {
    fmt::print(stderr, "deep_ep: rank {} ended with {}; the other ranks of this host are ended\n",
               place.node * ranks + static_cast<int>(*failed), describe_status(status));
  }
  children.signal_all(SIGTERM);
  constexpr double kGrace = 5;  // seconds until SIGKILL
  const Deadline end(kGrace);
  while (children.running() > 0 && !end.expired()) children.step();
  if (signal != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);  // the parent process sees by what it has ended
  }
  return status;
}

}  // namespace deep_ep::tools
