// Where the library's log lines go.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace deep_ep {

/// How much a line matters, ascending.
enum class LogLevel : std::uint8_t { trace, debug, info, warn, error };

/// Receives one log line: text without time, level and line end. Called by any thread, by several at once, and by
/// threads of the library's own; it must not block for long. An exception that it throws is dropped.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

/// Sends all further log lines of this process to `sink`. May be called at any time, by any thread; when it returns,
/// other threads may still be in the previous sink.
/// @param sink empty: lines go back to where DEEP_EP_LOG_FILE says, by default to standard error.
/// @param least the lowest level that is logged; unset: what DEEP_EP_LOG says.
void set_log_sink(LogSink sink, std::optional<LogLevel> least = {});

}  // namespace deep_ep
