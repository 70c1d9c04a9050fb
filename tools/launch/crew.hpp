// Processes that a launcher starts, and that end together: with all that they have started, however the launcher ends.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/unique_fd.hpp"
#include "tools/common/pipe.hpp"
#include "tools/launch/loop.hpp"
#include "tools/launch/rank_output.hpp"

namespace deep_ep::tools {

/// "status 3", "signal 9 (Killed)": what waitpid() has said, as a shell's number.
std::string describe_status(int status);

class Crew {
 public:
  struct Handlers {
    std::function<void(Stream stream, std::string_view text)> on_output;  ///< not of a stream that is led elsewhere
    std::function<void(int status)> on_end;                               ///< as a shell's $?: 128 + n for signal n
  };

  /// From now on SIGINT, SIGTERM and SIGHUP are counted instead of ending this process, and a guard, a process of its
  /// own, kills the members should this one be killed.
  explicit Crew(Loop& loop);
  /// Kills those that are left, with whatever they have started.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// A process group of its own. `variables`: "NAME=value", in place of this process's. `input`, `output`: -1: nothing
  /// to read, and a pipe whose text on_output gets. Standard error is always such a pipe.
  void start(const std::string& name, const std::vector<std::string>& command,
             const std::vector<std::string>& variables, int input, int output, Handlers handlers);

  /// Whether to read what the members print. Off, a pipe holds some of it, and who prints more waits.
  void set_reading(bool on);

  /// To the groups of all that still run.
  void signal_all(int signal) const;
  int running() const { return running_; }

  /// How often a signal has asked this process to end, and the last of these signals.
  int interruptions() const;
  int interrupted_by() const;

  /// Once in a while: takes leave of orphans that have ended.
  void reap_orphans();
  /// Ends whatever members have left behind, in process groups of its own as well; not what this process had started
  /// before it became a launcher (`sidecar & exec deep_ep launch`).
  void kill_orphans() const;

 private:
  struct Member {
    pid_t process = -1;
    UniqueFd ended;  ///< readable when it has
    UniqueFd out, err;
    Handlers handlers;
    bool running = true;
  };
  [[noreturn]] static void become(const std::vector<std::string>& command, std::vector<std::string> variables,
                                  int input, int output, int error);
  void read(Member& member, UniqueFd& from, Stream stream);
  void watch_output(Member& member);
  void take_end(Member& member);
  void tell_guard(pid_t group) const;

  Loop& loop_;
  std::vector<pid_t> strangers_;  ///< children of this process that are older than this
  std::vector<std::unique_ptr<Member>> members_;
  UniqueFd to_guard_;
  pid_t guard_ = -1;
  int running_ = 0;
  bool reading_ = true;
};

}  // namespace deep_ep::tools
