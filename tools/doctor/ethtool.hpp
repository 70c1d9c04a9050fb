// Counters of a network interface that sysfs does not have: of flow control above all.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "csrc/topology/system_root.hpp"

namespace deep_ep::tools {

/// As `ethtool -S INTERFACE` prints them. In a copy of another machine's files that output itself, kept as
/// /ethtool/INTERFACE. Empty where the driver has none.
std::map<std::string, std::uint64_t> read_ethtool(const topology::SystemRoot& root, const std::string& interface);

/// Pauses of a port in the words of the doctor, summed over the priorities: "pauses_received", "pauses_sent",
/// "paused_us", "pause_storms", "dropped_on_arrival". Those that the driver does not count are missing.
std::map<std::string, std::uint64_t> pauses_of(const std::map<std::string, std::uint64_t>& counters);

}  // namespace deep_ep::tools
