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

#include "csrc/support/environment.hpp"

namespace deep_ep::log {
namespace {

// Levels as numbers, and two that no line has: above all of them nothing is logged.
constexpr std::array<const char*, 5> kNames = {"trace", "debug", "info", "warn", "error"};
constexpr int kOff = static_cast<int>(kNames.size());
/// The environment is asked once the first line, or the sink, is there.
constexpr int kNotRead = kOff + 1;

std::string expand(std::string path) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  for (const auto& [mark, text] :
       {std::pair("%p", std::to_string(::getpid())), std::pair("%h", std::string(host.data()))}) {
    for (std::size_t at = 0; (at = path.find(mark, at)) != std::string::npos; at += text.size())
      path.replace(at, 2, text);
  }
  return path;
}

struct Log {
  std::atomic<int> least{kNotRead};
  std::mutex mutex;
  std::shared_ptr<const LogSink> sink;
};

Log& the_log() {
  // Never destroyed: tensors that outlive main() may still log.
  static auto& log = *new Log;
  return log;
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
  while (::write(file, text.data(), text.size()) < 0 && errno == EINTR) {
  }
}

/// Of the file that lines go to; where there is none standard error, which is told why.
int open_file() {
  const std::filesystem::path path = expand(environment::text("DEEP_EP_LOG_FILE"));
  if (path.empty()) return STDERR_FILENO;
  std::error_code unimportant;  // the file says it
  std::filesystem::create_directories(path.parent_path(), unimportant);
  const int file = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (file >= 0) return file;
  const std::string complaint = fmt::format("DEEP_EP_LOG_FILE: opening {}: {}", path.string(), errno_text(errno));
  if (the_log().least.load() <= static_cast<int>(Level::warn)) write_line(STDERR_FILENO, Level::warn, complaint);
  return STDERR_FILENO;
}

int least_level() {
  std::atomic<int>& least = the_log().least;
  int known = least.load(std::memory_order_relaxed);
  if (known != kNotRead) return known;
  int read = static_cast<int>(Level::warn);
  std::string complaint;
  try {
    const std::string word = environment::text("DEEP_EP_LOG");
    read = static_cast<int>(std::ranges::find(kNames, word) - kNames.begin());  // kOff: off
  } catch (const std::exception& error) {
    complaint = error.what();
  }
  // A wrong setting of the log is no reason to stop the program; it is reported where the log goes, by one thread.
  if (!least.compare_exchange_strong(known, read, std::memory_order_relaxed)) return known;
  if (!complaint.empty()) write(Level::warn, complaint);
  return read;
}

}  // namespace

bool enabled(Level level) noexcept { return static_cast<int>(level) >= least_level(); }

void write(Level level, std::string_view line) noexcept {
  try {
    std::unique_lock lock(the_log().mutex);
    const std::shared_ptr<const LogSink> sink = the_log().sink;
    lock.unlock();
    if (sink) return (*sink)(level, line);
    static const int file = open_file();
    write_line(file, level, line);
  } catch (...) {
    std::fprintf(stderr, "deep_ep: a log line was lost\n");
  }
}

}  // namespace deep_ep::log

namespace deep_ep {

void set_log_sink(LogSink sink, std::optional<LogLevel> least) {
  log::Log& state = log::the_log();
  {
    const std::lock_guard lock(state.mutex);
    state.sink = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
    state.least.store(least ? static_cast<int>(*least) : log::kNotRead, std::memory_order_relaxed);
  }
  log::least_level();
}

}  // namespace deep_ep
