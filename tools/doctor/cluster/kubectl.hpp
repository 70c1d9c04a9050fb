// Asks a cluster, within a bounded time.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace deep_ep::tools {

struct Answer {
  nlohmann::json items = nlohmann::json::array();
  std::string problem;        ///< empty: all is well
  bool unknown_kind = false;  ///< the cluster has no such kind of object
};
/// `kubectl get KIND... -o json`.
Answer ask_cluster(const std::string& kubectl, const std::vector<std::string>& kind, double seconds);

}  // namespace deep_ep::tools
