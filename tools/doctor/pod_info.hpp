// What Kubernetes tells a pod about itself: the files of the downward API, where manifests put them by custom.
#pragma once

#include <map>
#include <string>

#include "csrc/topology/system_root.hpp"

namespace deep_ep::tools {

/// `what`: "labels" or "annotations", of /etc/podinfo. Lines like name="value", with Go's escapes.
std::map<std::string, std::string> read_pod_info(const topology::SystemRoot& root, const std::string& what);

}  // namespace deep_ep::tools
