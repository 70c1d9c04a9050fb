// Commands that run as processes of their own and whose output is taken: measurements, so that what fails in one does
// not end the others, and kubectl.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace deep_ep::tools {

struct ChildCommand {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> variables{};  ///< besides or instead of this process's
  std::size_t most_output = SIZE_MAX;                            ///< bytes after which it is ended
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

/// Runs all at once. When one fails or `seconds` have passed, the others and all that they have started are killed;
/// they are killed as well when this process dies, also by Ctrl-C. One that a driver keeps from dying is left behind
/// after some seconds. @throws SystemError where a process cannot be made.
std::vector<ChildResult> run_children(const std::vector<ChildCommand>& commands, double seconds);

/// This program, for children.
std::string own_program();

/// Where a program lies on PATH; empty if nowhere.
std::string find_program(const std::string& name, const std::string& path);

}  // namespace deep_ep::tools
