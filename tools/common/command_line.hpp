// Options that several subcommands have.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace deep_ep::tools {

inline constexpr int kMostRanks = 64;

inline CLI::Option* add_ranks_option(CLI::App& command, int& ranks, const char* help) {
  return command.add_option("--ranks", ranks, help)->check(CLI::Range(1, kMostRanks));
}

/// For choose_device.
inline void add_device_option(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "auto: GPUs when there is one for every rank")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
}

}  // namespace deep_ep::tools
