// Commands that run as processes of their own: ranks, the selftest's processes.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

struct ChildCommand {
  std::vector<std::string> words;
  int output = STDOUT_FILENO, errors = STDERR_FILENO;  ///< descriptors to which it prints
};

/// Processes, each with the group of all that it starts. The groups are killed with this object; the processes alone
/// get SIGTERM when this process dies. One that a driver keeps from dying is left behind after some seconds.
class Children {
 public:
  /// @throws SystemError where a process cannot be made.
  explicit Children(const std::vector<ChildCommand>& commands);
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  /// Waits a moment for an end. Kills the processes that an ended child has left behind.
  void step();
  std::size_t running() const;
  /// 128 + number of a signal; 127 where it could not be started; nothing as long as it runs.
  std::optional<int> status(std::size_t which) const { return children_[which].status; }
  /// The one that was the first to end with another status than 0.
  std::optional<std::size_t> first_failure() const { return first_failure_; }
  /// To the groups of those that run.
  void signal_all(int signal) const;

 private:
  struct Child {
    pid_t process = -1;
    UniqueFd ended;  ///< readable when it has; none before Linux 5.3
    std::optional<int> status{};
  };
  void start(const ChildCommand& command);
  void take_end(std::size_t which);

  UniqueFd epoll_;
  std::vector<Child> children_;
  std::optional<std::size_t> first_failure_;
};

/// "status 3", "signal 9 (Killed)": of a status as above.
std::string describe_status(int status);

/// This program, for children.
std::string own_program();

}  // namespace deep_ep::tools
