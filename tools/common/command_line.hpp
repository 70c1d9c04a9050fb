// Options that several subcommands have.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace deep_ep::tools {

inline constexpr int kMostRanks = 64;

/// An option for numbers from `least` to `most`.
template <class Value, class Number>
CLI::Option* add_number(CLI::App& command, const char* names, Value& value, Number least, Number most,
                        const std::string& help) {
  return command.add_option(names, value, help)->check(CLI::Range(least, most));
}

inline CLI::Option* add_ranks_option(CLI::App& command, int& ranks, const char* help) {
  return add_number(command, "--ranks", ranks, 1, kMostRanks, help);
}

/// A flag that switches `value` off. The parser's own ("!--no-x") has "{false}" behind its name in the help.
inline void add_off_flag(CLI::App& command, const char* names, bool& value, const char* help) {
  command.add_flag_callback(
      names, [&value] { value = false; }, help);
}

/// For choose_device.
inline void add_device_option(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "auto: GPUs when there is one for every rank")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
}

}  // namespace deep_ep::tools
