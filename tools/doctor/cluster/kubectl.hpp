// Asks a cluster, within a bounded time.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace deep_ep::tools {

/// Where a program lies on PATH; empty if nowhere.
std::string find_program(const std::string& name, const std::string& path);

struct ProgramOutput {
  enum class End : std::uint8_t { exited, out_of_time, too_long, not_started };
  End end = End::not_started;
  int status = 0;
  std::string output;
  std::string errors;  ///< the first lines of its standard error
};
/// Its processes are ended when the time is over.
ProgramOutput run_program(const std::vector<std::string>& command, double seconds);

struct Answer {
  nlohmann::json items = nlohmann::json::array();
  std::string problem;        ///< empty: all is well
  bool unknown_kind = false;  ///< the cluster has no such kind of object
};
/// `kubectl get KIND... -o json`.
Answer ask_cluster(const std::string& kubectl, const std::vector<std::string>& kind, double seconds);

}  // namespace deep_ep::tools
