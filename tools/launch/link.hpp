// What the launchers of a run tell each other, over TCP or over ssh's standard input and output.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "csrc/support/unique_fd.hpp"
#include "tools/launch/loop.hpp"

namespace deep_ep::tools {

enum class Word : char {
  hello = 'h',   ///< a node's launcher: who it is (JSON)
  start = 's',   ///< the first launcher: all are there, start your ranks (JSON)
  output = 'o',  ///< a node's launcher: a rank has written; see output_text()
  failed = 'f',  ///< a node's launcher: status and text of what ended badly (JSON)
  done = 'd',    ///< a node's launcher: all its ranks have ended well
  end = 'e',     ///< the first launcher: status and text of the run, which is over (JSON)
  ping = 'p',    ///< both: still there
};

/// One end. Never blocks: what cannot be sent yet is kept.
class Link {
 public:
  using Clock = std::chrono::steady_clock;
  struct Handlers {
    std::function<void(Word word, std::string_view body)> on_word;
    std::function<void(std::string_view text)>
        on_noise;                                        ///< what came before the other side said that it is a launcher
    std::function<void(const std::string& why)> on_end;  ///< once; the other side has closed it, or it has failed
  };

  /// `in` and `out` may be copies of one socket's descriptor.
  Link(Loop& loop, UniqueFd in, UniqueFd out, Handlers handlers);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void send(Word word, std::string_view body = {});
  /// More waits to be sent than should.
  bool is_behind() const { return unsent_.size() > kManyUnsent; }
  /// Whether to read what the other side says. Off, its silence does not count.
  void set_reading(bool on);

  bool is_open() const { return static_cast<bool>(in_); }
  bool has_sent_all() const { return !out_ || unsent_.empty(); }
  double silent_for() const { return reading_ ? std::chrono::duration<double>(Clock::now() - heard_).count() : 0; }
  void close();

 private:
  static constexpr std::size_t kManyUnsent = 4U << 20;

  void receive();
  void flush();
  void take_words();
  void fail_with(const std::string& why);

  Loop& loop_;
  UniqueFd in_, out_;
  Handlers handlers_;
  std::string received_, unsent_;
  bool greeted_ = false;
  bool reading_ = true;
  Clock::time_point heard_ = Clock::now();
};

}  // namespace deep_ep::tools
