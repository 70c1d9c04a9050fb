#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "csrc/support/deadline.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/token.hpp"
#include "tools/common/child.hpp"
#include "tools/common/ranks.hpp"
#include "tools/launch/launch.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kGrace = 5;  ///< seconds between the request to end and SIGKILL, and from there to giving up
constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
volatile std::sig_atomic_t arrived[65] = {};

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { arrived[signal] = 1; };  // it ends a write, too
  for (const int signal : kPassedOn) {
    struct sigaction before {};
    ::sigaction(signal, &action, &before);
    if (before.sa_handler == SIG_IGN) ::sigaction(signal, &before, nullptr);  // as nohup wants it
  }
  ::signal(SIGPIPE, SIG_IGN);
}

std::vector<ChildCommand> commands_of(const std::vector<std::string>& words, const Place& place, int count) {
  std::vector<ChildCommand> commands;
  for (int i = 0; i < count; ++i) commands.push_back({.words = words, .variables = variables_of_rank(place, i, count)});
  return commands;
}

class Ranks {
 public:
  Ranks(const std::vector<std::string>& words, const Place& place, int count, bool labelled)
      : first_(place.node * count),
        labelled_(labelled),
        lines_(static_cast<std::size_t>(count)),
        children_(commands_of(words, place, count),
                  [this](std::size_t rank, int stream, std::string_view text) { take(rank, stream, text); }) {}

  int wait() {
    while (children_.running() > 0) {
      children_.step();
      if (const auto failed = children_.first_failure()) {
        end(*children_.status(*failed), SIGTERM, fmt::format("rank {} ended with ", number_of(*failed)));
      }
      pass_signals_on();
      if (!deadline_.expired()) continue;
      if (killed_) {
        say("ranks do not end though they were killed; they are left behind");
        std::_Exit(*status_);
      }
      killed_ = true;
      deadline_ = Deadline(kGrace);
      children_.signal_all(SIGKILL);
    }
    if (!problem_.empty()) say("output of ranks was not written: " + problem_);
    return status_.value_or(problem_.empty() ? 0 : 1);
  }

 private:
  int number_of(std::size_t rank) const { return first_ + static_cast<int>(rank); }

  void take(std::size_t rank, int stream, std::string_view text) {
    constexpr std::size_t kLongestLine = 65536;
    std::string& line = lines_[rank][static_cast<std::size_t>(stream)].append(text);
    for (std::size_t end; (end = line.find_first_of("\n\r")) != std::string::npos;) show(rank, stream, line, end + 1);
    if (text.empty() || line.size() > kLongestLine) show(rank, stream, line, line.size());
  }

  void show(std::size_t rank, int stream, std::string& line, std::size_t size) {
    const std::string all = (labelled_ && size > 0 ? fmt::format("[{}] ", number_of(rank)) : "") + line.substr(0, size);
    line.erase(0, size);
    for (std::string_view text = all; !text.empty() && problem_.empty();) {  // a slow reader holds the ranks up
      const ssize_t count = ::write(stream == 0 ? STDOUT_FILENO : STDERR_FILENO, text.data(), text.size());
      if (count > 0) text.remove_prefix(static_cast<std::size_t>(count));
      if (count < 0 && (errno != EINTR || arrived[SIGINT] + arrived[SIGTERM] + arrived[SIGHUP] > 0))
        problem_ = errno_text(errno);
    }
  }

  void pass_signals_on() {
    for (const int signal : kPassedOn) {
      if (arrived[signal] == 0) continue;
      arrived[signal] = 0;
      if (signal == SIGUSR1 || signal == SIGUSR2) {
        children_.signal_all(signal);
      } else if (status_) {  // the second request
        deadline_ = Deadline(1e-9);
      } else {
        end(128 + signal, signal, "asked to end by ");
      }
    }
  }

  /// The first reason counts.
  void end(int status, int signal, const std::string& why) {
    if (status_) return;
    status_ = status;
    const bool others = children_.running() > 0;
    say(why + describe_status(status) + (others ? "; the ranks that still run here are ended" : ""));
    deadline_ = Deadline(kGrace);
    children_.signal_all(signal);
  }

  static void say(const std::string& what) { fmt::print(stderr, "deep_ep: {}\n", what); }

  int first_;  ///< rank of this host
  bool labelled_;
  std::vector<std::array<std::string, 2>> lines_;  ///< of output and errors: what has come of one that is not complete
  std::string problem_;                            ///< with the output
  bool killed_ = false;
  std::optional<int> status_;
  Deadline deadline_{0};  ///< until which the ranks must have ended; at first never
  Children children_;
};

}  // namespace

int run_rank_processes(const std::vector<std::string>& words, Place place, int ranks, bool labelled) {
  if (place.port == 0) place.port = place.nodes > 1 ? 29500 : free_port();
  if (place.nodes == 1) place.job = to_string(random_token());
  const std::string agreed = environment::Reader().value("DEEP_EP_JOB_TOKEN").text;
  if (!agreed.empty()) place.job = agreed;
  catch_signals();
  return Ranks(words, place, ranks, labelled).wait();
}

}  // namespace deep_ep::tools
