#include "csrc/support/logging.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "csrc/support/environment.hpp"

namespace deep_ep::log {
namespace {

// Levels as numbers, and two that no line has: above all of them nothing is logged.
constexpr std::array<const char*, 5> kNames = {"trace", "debug", "info", "warn", "error"};
constexpr int kOff = static_cast<int>(kNames.size());
/// The environment is asked once the first line, or the sink, is there.
constexpr int kNotRead = kOff + 1;

std::string expand(std::string_view pattern) {
  std::string path;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '%' || i + 1 == pattern.size()) {
      path += pattern[i];
      continue;
    }
    const char letter = pattern[++i];
    if (letter == 'p') {
      path += std::to_string(::getpid());
    } else if (letter == 'h') {
      std::array<char, 256> host{};
      ::gethostname(host.data(), host.size() - 1);
      path += host.data();
    } else {
      path += '%';
      path += letter;
    }
  }
  return path;
}

/// Of the file that lines go to.
int open_file(std::string& complaint) {
  try {
    const std::string pattern = environment::text("DEEP_EP_LOG_FILE");
    if (pattern.empty()) return STDERR_FILENO;
    const std::filesystem::path path = expand(pattern);
    std::error_code unimportant;  // the file says it
    std::filesystem::create_directories(path.parent_path(), unimportant);
    const int file = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file >= 0) return file;
    complaint = fmt::format("DEEP_EP_LOG_FILE: opening {}: {}", path.string(), errno_text(errno));
  } catch (const std::exception& error) {
    complaint = error.what();
  }
  return STDERR_FILENO;
}

/// In one piece, so that lines of threads, and of processes that share a file, do not mix.
void write_line(int file, Level level, std::string_view line) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  std::tm parts{};
  ::localtime_r(&now.tv_sec, &parts);
  std::array<char, 32> second{};
  std::strftime(second.data(), second.size(), "%Y-%m-%d %H:%M:%S", &parts);
  const char* name = level == Level::warn ? "warning" : kNames[static_cast<std::size_t>(level)];
  const std::string text =
      fmt::format("[{}.{:03}] [deep_ep {}] [{}] {}\n", second.data(), now.tv_nsec / 1'000'000, ::getpid(), name, line);
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return;
    done += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
}

int level_of_environment(std::string& complaint) {
  try {
    const std::string word = environment::choice("DEEP_EP_LOG");
    return static_cast<int>(std::find(kNames.begin(), kNames.end(), word) - kNames.begin());  // kOff: off
  } catch (const std::exception& error) {
    complaint = error.what();
    return static_cast<int>(Level::warn);
  }
}

class Log {
 public:
  static Log& instance() {
    // Never destroyed: tensors that outlive main() may still log.
    static auto* log = new Log;
    return *log;
  }

  bool enabled(Level level) {
    int least = least_.load(std::memory_order_relaxed);
    if (least == kNotRead) least = read_level();
    return static_cast<int>(level) >= least;
  }

  void write(Level level, std::string_view line) {
    std::shared_ptr<const LogSink> sink;
    std::string complaint;
    int file = -1;
    {
      const std::lock_guard lock(mutex_);
      sink = sink_;
      if (!sink && file_ < 0) file_ = open_file(complaint);
      file = file_;
    }
    if (sink) {
      (*sink)(level, line);
      return;
    }
    if (!complaint.empty() && enabled(Level::warn)) write_line(file, Level::warn, complaint);
    write_line(file, level, line);
  }

  void set_sink(LogSink sink, std::optional<LogLevel> least) {
    {
      const std::lock_guard lock(mutex_);
      sink_ = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
      least_.store(least ? static_cast<int>(*least) : kNotRead, std::memory_order_relaxed);
    }
    if (!least) read_level();
  }

 private:
  Log() = default;

  int read_level() {
    std::string complaint;
    int least = kNotRead;
    {
      const std::lock_guard lock(mutex_);
      least = least_.load(std::memory_order_relaxed);
      if (least != kNotRead) return least;
      least = level_of_environment(complaint);
      least_.store(least, std::memory_order_relaxed);
    }
    // A wrong setting of the log is no reason to stop the program; it is reported where the log goes.
    if (!complaint.empty()) write(Level::warn, complaint);
    return least;
  }

  std::atomic<int> least_{kNotRead};
  std::mutex mutex_;
  std::shared_ptr<const LogSink> sink_;
  int file_ = -1;  ///< opened for the first line that goes to a file or to standard error
};

}  // namespace

bool enabled(Level level) noexcept {
  try {
    return Log::instance().enabled(level);
  } catch (...) {
    return false;
  }
}

void write(Level level, std::string_view line) noexcept {
  try {
    Log::instance().write(level, line);
  } catch (...) {
    std::fprintf(stderr, "deep_ep: a log line was lost\n");
  }
}

}  // namespace deep_ep::log

namespace deep_ep {

void set_log_sink(LogSink sink, std::optional<LogLevel> least) {
  log::Log::instance().set_sink(std::move(sink), least);
}

}  // namespace deep_ep
