// Commands that run as processes of their own: ranks, measurements (so that what fails in one does not end the others),
// kubectl.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

struct ChildCommand {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> variables{};  ///< besides or instead of this process's
  std::size_t most_output = SIZE_MAX;                            ///< bytes after which it is ended
};

/// A process, and the group of all that it starts. The group is killed with this object; the process alone gets SIGTERM
/// when this process dies.
class Child {
 public:
  /// @throws SystemError where a process cannot be made.
  explicit Child(const ChildCommand& command);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  UniqueFd output, errors;  ///< to read what it prints; the caller may close them

  pid_t process() const { return process_; }
  /// As ChildResult::status, once it has ended.
  std::optional<int> status();
  /// To its group.
  void signal_all(int signal) const;

 private:
  pid_t process_ = -1;
  std::optional<int> status_;
};

struct ChildResult {
  int status = 0;  ///< 128 + number of a signal; 127 where it could not be started
  bool timed_out = false;
  bool too_long = false;  ///< it printed more than it may
  std::string output{};
  std::string errors{};

  bool well() const { return status == 0 && !timed_out && !too_long; }
  /// One line: what it said last on standard error, or how it ended.
  std::string reason() const;
};

/// "status 3", "signal 9 (Killed)": of a status as above.
std::string describe_status(int status);

/// Runs all at once. When one fails or `seconds` have passed, the others and all that they have started are killed;
/// they are killed as well when this process dies, also by Ctrl-C. One that a driver keeps from dying is left behind
/// after some seconds. @throws SystemError where a process cannot be made.
std::vector<ChildResult> run_children(const std::vector<ChildCommand>& commands, double seconds);

/// This program, for children.
std::string own_program();

/// Where a program lies on PATH; empty if nowhere.
std::string find_program(const std::string& name, const std::string& path);

}  // namespace deep_ep::tools
