#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include "csrc/support/deadline.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/token.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/child.hpp"
#include "tools/common/ranks.hpp"
#include "tools/launch/launch.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kGrace = 5;  ///< seconds between the request to end and SIGKILL, and from there to giving up
constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
volatile std::sig_atomic_t arrived[65] = {};

struct Rank {
  Rank(int which, const ChildCommand& command) : number(which), child(command) {}
  int number;
  Child child;
  UniqueFd ended;       ///< readable when it has
  std::string line[2];  ///< of output and errors: what has come of one that is not complete
};

class Ranks {
 public:
  Ranks(const std::vector<std::string>& words, const Place& place, int count, bool labelled) : labelled_(labelled) {
    struct sigaction action {};
    action.sa_handler = [](int signal) { arrived[signal] = 1; };  // it ends a write, too
    for (const int signal : kPassedOn) {
      struct sigaction before {};
      ::sigaction(signal, &action, &before);
      if (before.sa_handler == SIG_IGN) ::sigaction(signal, &before, nullptr);  // as nohup wants it
    }
    ::signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < count; ++i) {
      Rank& rank = *ranks_.emplace_back(std::make_unique<Rank>(
          place.node * count + i, ChildCommand{.words = words, .variables = variables_of_rank(place, i, count)}));
      rank.ended = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, rank.child.process(), 0)));
      for (const int fd : {rank.child.output.get(), rank.child.errors.get(), rank.ended.get()}) {
        if (fd != rank.ended.get()) ::fcntl(fd, F_SETFL, O_NONBLOCK);
        const auto tag = static_cast<std::uint64_t>(2 * i + (fd == rank.ended.get() ? 1 : 0));
        epoll_event event{.events = EPOLLIN, .data = {.u64 = tag}};
        if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
          fail<SystemError>("launch: cannot watch ranks: {} (Linux 5.3 or later is needed)", errno_text(errno));
        }
      }
    }
    running_ = count;
  }

  int wait() {
    while (running_ > 0) {
      std::array<epoll_event, 64> events;
      // What became ready first comes first: which of two ranks ended before the other matters.
      const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 200);
      for (int i = 0; i < count; ++i) take(events[static_cast<std::size_t>(i)].data.u64);
      pass_signals_on();
      if (!deadline_.expired()) continue;
      if (killed_) {
        say("ranks do not end though they were killed; they are left behind");
        std::_Exit(*status_);
      }
      killed_ = true;
      deadline_ = Deadline(kGrace);
      signal_all(SIGKILL);
    }
    if (!problem_.empty()) say("output of ranks was not written: " + problem_);
    return status_.value_or(problem_.empty() ? 0 : 1);
  }

 private:
  void take(std::uint64_t tag) {
    Rank& rank = *ranks_[tag / 2];
    if (!rank.ended) return;
    const std::optional<int> status = tag % 2 == 1 ? rank.child.status() : std::nullopt;
    if (!status) return take_output(rank);
    rank.child.signal_all(SIGKILL);                 // what it has left behind
    for (int i = 0; i < 3; ++i) take_output(rank);  // what a pipe holds; more is of a process that has left the group
    for (const int i : {0, 1}) show(rank, i, rank.line[i].size());
    for (UniqueFd* one : {&rank.child.output, &rank.child.errors, &rank.ended}) *one = UniqueFd();
    --running_;
    if (*status != 0) end(*status, SIGTERM, fmt::format("rank {} ended with ", rank.number));
  }

  void take_output(Rank& rank) {
    for (const int i : {0, 1}) {
      UniqueFd& from = i == 0 ? rank.child.output : rank.child.errors;
      std::array<char, 65536> bytes;
      const ssize_t count = from ? ::read(from.get(), bytes.data(), bytes.size()) : -1;
      if (count == 0) from = UniqueFd();
      if (count <= 0) continue;
      std::string& line = rank.line[i].append(bytes.data(), static_cast<std::size_t>(count));
      for (std::size_t end; (end = line.find_first_of("\n\r")) != std::string::npos;) show(rank, i, end + 1);
      if (line.size() > bytes.size()) show(rank, i, line.size());
    }
  }

  void show(Rank& rank, int which, std::size_t size) {
    const std::string all =
        (labelled_ && size > 0 ? fmt::format("[{}] ", rank.number) : "") + rank.line[which].substr(0, size);
    rank.line[which].erase(0, size);
    for (std::string_view text = all; !text.empty() && problem_.empty();) {  // a slow reader holds the ranks up
      const ssize_t count = ::write(which == 0 ? STDOUT_FILENO : STDERR_FILENO, text.data(), text.size());
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
        signal_all(signal);
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
    say(why + describe_status(status) + (running_ > 0 ? "; the ranks that still run here are ended" : ""));
    deadline_ = Deadline(kGrace);
    signal_all(signal);
  }

  void signal_all(int signal) const {
    for (const auto& rank : ranks_) {
      if (rank->ended) rank->child.signal_all(signal);
    }
  }

  static void say(const std::string& what) { fmt::print(stderr, "deep_ep: {}\n", what); }

  UniqueFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  bool labelled_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int running_ = 0;
  bool killed_ = false;
  std::optional<int> status_;
  Deadline deadline_{0};  ///< until which the ranks must have ended; at first never
  std::string problem_;   ///< with the output
};

}  // namespace

int run_rank_processes(const std::vector<std::string>& words, Place place, int ranks, bool labelled) {
  if (place.port == 0) place.port = place.nodes > 1 ? 29500 : free_port();
  if (place.nodes == 1) place.job = to_string(random_token());
  const std::string agreed = environment::Reader().value("DEEP_EP_JOB_TOKEN").text;
  if (!agreed.empty()) place.job = agreed;
  return Ranks(words, place, ranks, labelled).wait();
}

}  // namespace deep_ep::tools
