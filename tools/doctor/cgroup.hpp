// What the control groups of this process let it have: containers and batch systems set them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "csrc/topology/system_root.hpp"

namespace deep_ep::tools {

/// Nothing where there is no limit, or none is known. Each is the tightest of all groups above the process.
struct CgroupLimits {
  std::optional<std::uint64_t> memory;
  std::optional<std::uint64_t> processes;  ///< threads count
  std::optional<double> cpus;
  struct Rdma {
    std::optional<std::uint64_t> handles;  ///< times that the device is opened
    std::optional<std::uint64_t> objects;  ///< queue pairs, completion queues, registrations, ...
  };
  std::map<std::string, Rdma> nics;  ///< by the device's name
};
CgroupLimits read_cgroup(const topology::SystemRoot& root);

}  // namespace deep_ep::tools
