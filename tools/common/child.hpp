// Commands that run as processes of their own: ranks, the selftest's processes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

struct ChildCommand {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> variables{};  ///< besides or instead of this process's
};

/// Processes, each with the group of all that it starts. The groups are killed with this object; the processes alone
/// get SIGTERM when this process dies. One that a driver keeps from dying is left behind after some seconds.
class Children {
 public:
  /// Gets the text that child `which` has printed on standard output (0) or standard error (1); an empty one when it
  /// has ended.
  using Print = std::function<void(std::size_t which, int stream, std::string_view text)>;

  /// @throws SystemError where a process cannot be made.
  Children(const std::vector<ChildCommand>& commands, Print print);
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  /// Waits a moment for output or an end, and takes it. Kills the processes that an ended child has left behind.
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
    UniqueFd output[2];  ///< to read; nonblocking
    UniqueFd ended;      ///< readable when it has; none before Linux 5.3
    std::optional<int> status{};
  };
  void start(const ChildCommand& command);
  void take_output(std::size_t which);
  void take_end(std::size_t which);

  Print print_;
  UniqueFd epoll_;
  std::vector<Child> children_;
  std::optional<std::size_t> first_failure_;
};

/// To `output` what children print on standard output, the rest to standard error.
Children::Print pass_on(std::FILE* output);

/// "status 3", "signal 9 (Killed)": of a status as above.
std::string describe_status(int status);

/// This program, for children.
std::string own_program();

}  // namespace deep_ep::tools
