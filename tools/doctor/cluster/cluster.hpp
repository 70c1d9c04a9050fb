// `deep_ep doctor --cluster`: what a Kubernetes cluster offers for runs of several nodes, asked by kubectl.
#pragma once

#include <string>

#include "tools/doctor/report.hpp"

namespace deep_ep::tools {

struct ClusterOptions {
  std::string path;     ///< where kubectl and gcloud are looked for
  double seconds = 15;  ///< for each question
};
Findings check_cluster(const ClusterOptions& options);

int run_cluster(const ClusterOptions& options, bool json);

}  // namespace deep_ep::tools
