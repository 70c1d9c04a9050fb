// Commands that a benchmark runs as processes of their own, so that what fails in one does not end the others.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace deep_ep::tools {

struct ChildCommand {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> variables{};  ///< besides or instead of this process's
};

struct ChildResult {
  int status = 0;  ///< 128 + number of a signal
  bool timed_out = false;
  std::string output{};
  std::string errors{};

  bool well() const { return status == 0 && !timed_out; }
  /// One line: what it said last on standard error, or how it ended.
  std::string reason() const;
};

/// Runs all at once. When one fails or `seconds` have passed, the others and all that they have started are killed;
/// they are killed as well when this process dies. @throws SystemError where a process cannot be started.
std::vector<ChildResult> run_children(const std::vector<ChildCommand>& commands, double seconds);

/// This program, for children.
std::string own_program();

}  // namespace deep_ep::tools
