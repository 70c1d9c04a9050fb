// Log lines of the library: log::info("heap: {} of {}", bytes, kind). Level and place: set_log_sink (deep_ep/log.hpp),
// otherwise DEEP_EP_LOG and DEEP_EP_LOG_FILE.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/support/format.hpp"
#include "deep_ep/log.hpp"

namespace deep_ep::log {

using Level = LogLevel;

/// Cheap; asked before a line is formatted.
bool enabled(Level level) noexcept;
/// One line. Never throws: losing a log line must not lose a training run.
void write(Level level, std::string_view line) noexcept;

template <class... Args>
void at(Level level, fmt::format_string<Args...> pattern, Args&&... args) {
  if (enabled(level)) write(level, fmt::format(pattern, std::forward<Args>(args)...));
}
template <class... Args>
void debug(fmt::format_string<Args...> pattern, Args&&... args) {
  at(Level::debug, pattern, std::forward<Args>(args)...);
}
template <class... Args>
void info(fmt::format_string<Args...> pattern, Args&&... args) {
  at(Level::info, pattern, std::forward<Args>(args)...);
}
template <class... Args>
void warn(fmt::format_string<Args...> pattern, Args&&... args) {
  at(Level::warn, pattern, std::forward<Args>(args)...);
}
template <class... Args>
void error(fmt::format_string<Args...> pattern, Args&&... args) {
  at(Level::error, pattern, std::forward<Args>(args)...);
}

/// The end of an object must not throw, and at exit the driver may be gone.
template <class Action>
void quietly(const Action& action) noexcept {
  try {
    action();
  } catch (const std::exception& failure) {
    debug("what an object held was not given back: {}", failure.what());
  }
}

}  // namespace deep_ep::log
