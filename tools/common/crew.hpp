// Processes that a command starts, and that end together.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace deep_ep::tools {

class Crew {
 public:
  /// From now on SIGINT, SIGTERM and SIGHUP end the processes instead of this one.
  Crew();
  /// Ends those that are left.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// A process group of its own; SIGTERM tells it when this process has died. `variables`: "NAME=value", in place of
  /// this process's. `input` and `output`: descriptors; -1: nothing to read, and where this process writes. `name`: for
  /// messages.
  void start(const std::string& name, const std::vector<std::string>& command,
             const std::vector<std::string>& variables, int input, int output);

  /// Until all have ended. Asks them to end by `request_end` when one has failed, when a signal says so and, with
  /// `lifeline`, when standard input ends; kills those that are there 5 s later. `meanwhile` is called again and again,
  /// and takes some milliseconds. Returns the exit status: 0, or that of the first that failed; 128 + number of a
  /// signal.
  int run(bool lifeline, const std::function<void()>& request_end, const std::function<void()>& meanwhile);

  void signal_all(int signal) const;

 private:
  struct Member {
    pid_t process;
    std::string name;
    std::optional<int> status;
  };
  static bool has_just_ended(Member& member);

  std::vector<Member> members_;
};

}  // namespace deep_ep::tools
