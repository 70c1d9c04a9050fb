// `deep_ep doctor --nic-counters -- COMMAND`: what each NIC carried while the command ran.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

/// Counters of one port, by name; bytes where the kernel counts words of four.
struct PortCounters {
  std::string nic;
  int port = 1;
  std::map<std::string, std::uint64_t> values;
};

/// Of all ports of all NICs. Counters that a device lacks are missing.
std::vector<PortCounters> read_counters(const Patient& patient);

/// What was counted between two readings of the same machine; a counter that went back (a driver was reloaded) is left
/// out.
std::vector<PortCounters> difference(const std::vector<PortCounters>& before, std::vector<PortCounters> after);

/// Says which of the NICs that its GPUs use carried less than half of the average, and whether packets were lost.
void check_traffic(const Patient& patient, const std::vector<PortCounters>& traffic, Findings& findings);

std::string to_text(const std::vector<PortCounters>& traffic);

/// Runs a command and returns its exit status as Children have it. Its output goes on to this process's standard
/// streams; `output_to_stderr` keeps this process's standard output for itself.
int run_command(const std::vector<std::string>& command, bool output_to_stderr);

}  // namespace deep_ep::tools
