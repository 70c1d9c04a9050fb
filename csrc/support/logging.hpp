// Log lines of the library: log::info("heap: {} of {}", bytes, kind). Level and place: set_log_sink (deep_ep/log.hpp),
// otherwise DEEP_EP_LOG and DEEP_EP_LOG_FILE.
#pragma once

#include <exception>
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

struct At {
  Level level;
  template <class... Args>
  void operator()(fmt::format_string<Args...> pattern, Args&&... args) const {
    if (enabled(level)) write(level, fmt::format(pattern, std::forward<Args>(args)...));
  }
};
inline constexpr At debug{Level::debug}, info{Level::info}, warn{Level::warn}, error{Level::error};

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
