// Where what ranks print goes: a log of each rank, and this launcher's standard output and error.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/support/unique_fd.hpp"
#include "tools/launch/terminal.hpp"

namespace deep_ep::tools {

enum class Stream : char { out = 'o', err = 'e' };

class RankOutput {
 public:
  /// `folder`: for the logs, made where it is not there; empty: no logs. SystemError where it cannot be written.
  explicit RankOutput(std::string folder);

  /// Removes the logs of a larger run before this one: ranks 0 to world_size - 1 write theirs anew, wherever they are.
  void remove_logs_from(int world_size) const;

  /// Begins a rank's log with `header`; `shows`: the terminal shows the rank, too.
  void open(int rank, const std::string& header, bool shows);
  void take(int rank, Stream stream, std::string_view text);
  /// Ranks should wait a little: who reads the terminal is slower than they are.
  bool is_behind() const { return out_.is_behind() || err_.is_behind(); }
  /// A file beside the logs, in one piece; nothing without logs.
  void write_file(const std::string& name, const std::string& text);
  /// A line of the launcher's own, on standard error.
  void say(const std::string& line);

  /// The file of this rank, empty without logs.
  std::string log_of(int rank) const;
  /// Writes what is left. What went wrong with any of it, empty if nothing did.
  std::string finish();

 private:
  struct Log {
    UniqueFd file;
    bool shows = false;
  };
  void write_log(int rank, std::string_view text);
  void show(Stream stream, std::string_view text) { (stream == Stream::out ? out_ : err_).write(text); }

  std::string folder_;
  std::map<int, Log> logs_;
  std::map<std::pair<int, Stream>, std::string> unfinished_;  ///< lines of ranks, so that the terminal gets whole ones
  std::string problem_;
  Terminal out_, err_;
};

}  // namespace deep_ep::tools
