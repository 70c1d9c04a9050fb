#include "csrc/support/logging.hpp"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "csrc/support/environment.hpp"

namespace deep_ep::log {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  static constexpr std::array kLevels = {spdlog::level::trace, spdlog::level::debug, spdlog::level::info,
                                         spdlog::level::warn, spdlog::level::err};
  return kLevels[static_cast<std::size_t>(level)];
}

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

std::shared_ptr<spdlog::logger> make_logger(std::string& complaint) {
  // A logger of our own, not in spdlog's registry: a program that also uses spdlog keeps its settings and its names.
  const auto to_stderr = [] {
    return std::make_shared<spdlog::logger>("deep_ep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  };
  std::shared_ptr<spdlog::logger> logger;
  try {
    const std::string file = environment::text("DEEP_EP_LOG_FILE");
    logger = file.empty() ? to_stderr()
                          : std::make_shared<spdlog::logger>(
                                "deep_ep", std::make_shared<spdlog::sinks::basic_file_sink_mt>(expand(file)));
  } catch (const std::exception& error) {
    complaint = error.what();
    logger = to_stderr();
  }
  logger->set_pattern("[%Y-%m-%d %H:%M:%S.%e] [deep_ep %P] [%l] %v");
  logger->set_level(spdlog::level::trace);  // what is below the level in effect never gets here
  logger->flush_on(spdlog::level::info);
  return logger;
}

spdlog::level::level_enum level_of_environment(std::string& complaint) {
  try {
    return spdlog::level::from_str(environment::choice("DEEP_EP_LOG"));
  } catch (const std::exception& error) {
    complaint = error.what();
    return spdlog::level::warn;
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
    auto least = least_.load(std::memory_order_relaxed);
    if (least == kNotRead) least = read_level();
    return to_spdlog(level) >= least;
  }

  void write(Level level, std::string_view line) {
    std::shared_ptr<const LogSink> sink;
    std::shared_ptr<spdlog::logger> logger;
    std::string complaint;
    {
      const std::lock_guard lock(mutex_);
      sink = sink_;
      if (!sink) {
        if (!logger_) logger_ = make_logger(complaint);
        logger = logger_;
      }
    }
    if (sink) {
      (*sink)(level, line);
      return;
    }
    if (!complaint.empty() && enabled(Level::warn)) logger->warn("{}", complaint);
    logger->log(to_spdlog(level), line);
  }

  void set_sink(LogSink sink, std::optional<LogLevel> least) {
    {
      const std::lock_guard lock(mutex_);
      sink_ = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
      least_.store(least ? to_spdlog(*least) : kNotRead, std::memory_order_relaxed);
    }
    if (!least) read_level();
  }

 private:
  /// No level, and above all of them: the environment is asked once the first line, or the sink, is there.
  static constexpr auto kNotRead = spdlog::level::n_levels;

  Log() = default;

  spdlog::level::level_enum read_level() {
    std::string complaint;
    spdlog::level::level_enum least;
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

  std::atomic<spdlog::level::level_enum> least_{kNotRead};
  std::mutex mutex_;
  std::shared_ptr<const LogSink> sink_;
  std::shared_ptr<spdlog::logger> logger_;  // made for the first line that goes to a file or to standard error
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
