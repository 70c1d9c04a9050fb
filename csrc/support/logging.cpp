#include "csrc/support/logging.hpp"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <memory>

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

std::shared_ptr<spdlog::logger> make_logger() {
  // An own logger, not in spdlog's registry: a program that uses spdlog too keeps its settings and its names.
  const auto to_stderr = [] {
    return std::make_shared<spdlog::logger>("deep_ep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  };
  std::shared_ptr<spdlog::logger> logger;
  std::string complaint;
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
  try {
    logger->set_level(spdlog::level::from_str(environment::choice("DEEP_EP_LOG")));
  } catch (const std::exception& error) {
    complaint = error.what();
    logger->set_level(spdlog::level::warn);
  }
  logger->flush_on(spdlog::level::info);
  // A wrong setting of the log is no reason to stop the program; it is said where the log goes.
  if (!complaint.empty()) logger->warn("{}", complaint);
  return logger;
}

spdlog::logger& logger() {
  // Never destroyed: tensors that outlive main() may still log.
  static auto* instance = new std::shared_ptr<spdlog::logger>(make_logger());
  return **instance;
}

}  // namespace

bool enabled(Level level) noexcept {
  try {
    return logger().should_log(to_spdlog(level));
  } catch (...) {
    return false;
  }
}

void write(Level level, std::string_view line) noexcept {
  try {
    logger().log(to_spdlog(level), line);
  } catch (...) {
    std::fprintf(stderr, "deep_ep: a log line was lost\n");
  }
}

}  // namespace deep_ep::log
