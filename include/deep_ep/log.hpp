// The destination of the library's log lines.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace deep_ep {

/// How much a line matters, ascending.
enum class LogLevel : std::uint8_t { trace, debug, info, warn, error };

/// Receives one log line: text without time, level and line end. Any threads call it, several at once, also threads of
/// the library. It must not block for long. The library drops an exception that it throws.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

/// Sends all further log lines of this process to `sink`. Any thread may call it at any time; when it returns, other
/// threads may still be in the previous sink.
/// @param sink empty: lines go to DEEP_EP_LOG_FILE again, by default to standard error.
/// @param least the lowest level that is logged; unset: that of DEEP_EP_LOG.
void set_log_sink(LogSink sink, std::optional<LogLevel> least = {});

}  // namespace deep_ep
