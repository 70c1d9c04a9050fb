#include "python/bindings/log_lines.hpp"

#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/log.hpp"

namespace deep_ep::bindings {
namespace {

/// As `logging` numbers them, by LogLevel. It has no trace.
constexpr std::array kLevels = {5, 10, 20, 30, 40};

std::optional<LogLevel> level_from(int least) {
  if (least == 0) return {};
  for (std::size_t level = 0; level + 1 < kLevels.size(); ++level) {
    if (kLevels[level] >= least) return static_cast<LogLevel>(level);
  }
  return LogLevel::error;
}

class LogLines {
 public:
  /// Of this process: a forked child cannot use what its parent's thread waits at. Called with the GIL. Never
  /// destroyed: the library may log after the interpreter has gone.
  static LogLines& instance() {
    static LogLines* lines = nullptr;
    if (lines == nullptr || lines->process_ != ::getpid()) lines = new LogLines;
    return *lines;
  }

  void begin(std::optional<LogLevel> least) {
    {
      const std::lock_guard lock(mutex_);
      ended_ = false;
    }
    set_log_sink([this](LogLevel level, std::string_view line) { take(level, line); }, least);
  }

  void end() {
    set_log_sink(nullptr);
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

  std::vector<std::pair<int, std::string>> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ || !lines_.empty(); });
    auto lines = std::exchange(lines_, {});
    if (lost_ != 0) {
      lines.emplace_back(kLevels[static_cast<std::size_t>(LogLevel::warn)],
                         "log: " + std::to_string(lost_) + " lines were lost, as the sink did not keep up");
      lost_ = 0;
    }
    return lines;
  }

 private:
  void take(LogLevel level, std::string_view line) {
    if (::getpid() != process_) {
      std::fprintf(stderr, "deep_ep: %.*s\n", static_cast<int>(line.size()), line.data());
      return;
    }
    constexpr std::size_t kMost = 10000;  // so that a sink that hangs does not take all memory
    const std::lock_guard lock(mutex_);
    if (lines_.size() == kMost) {
      ++lost_;
      return;
    }
    lines_.emplace_back(kLevels[static_cast<std::size_t>(level)], line);
    changed_.notify_all();
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<int, std::string>> lines_;
  std::size_t lost_ = 0;
  bool ended_ = true;
};

}  // namespace

void begin_log_lines(int least) { LogLines::instance().begin(level_from(least)); }

void end_log_lines() { LogLines::instance().end(); }

py::tuple next_log_lines() {
  LogLines& queue = LogLines::instance();
  std::vector<std::pair<int, std::string>> lines;
  {
    const py::gil_scoped_release released;
    lines = queue.next();
  }
  py::tuple result(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const auto& [level, line] = lines[i];
    // Text from outside in a line, a name of a file for instance, need not be UTF-8.
    PyObject* text = PyUnicode_DecodeUTF8(line.data(), static_cast<py::ssize_t>(line.size()), "replace");
    if (text == nullptr) throw py::error_already_set();
    result[i] = py::make_tuple(level, py::reinterpret_steal<py::str>(text));
  }
  return result;
}

}  // namespace deep_ep::bindings
