// `deep_ep doctor`: may GPUs ring the doorbells of NICs?
#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <sstream>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

// Numbers of linux/capability.h.
constexpr int kIpcLock = 14;
constexpr int kSysRawio = 17;
constexpr int kSysAdmin = 21;

// Drivers from 510.40.3 on map the registers of other PCI devices into a GPU's address space.
constexpr int kFirstDoorbellDriver = 510;

bool driver_is_too_old(const Patient& patient, std::string& version) {
  version = patient.root.read("/sys/module/nvidia/version").value_or("");
  int major = 0;
  std::from_chars(version.data(), version.data() + version.size(), major);
  return !version.empty() && major < kFirstDoorbellDriver;
}

bool peer_mapping_override(const Patient& patient) {
  const std::string params = patient.root.read("/proc/driver/nvidia/params").value_or("");
  return params.find("PeerMappingOverride=1") != std::string::npos;
}

}  // namespace

std::optional<Privileges> read_privileges(const topology::SystemRoot& root) {
  std::istringstream status(root.read("/proc/self/status").value_or(""));
  constexpr std::string_view kName = "CapEff:";
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(kName)) continue;
    const std::string_view mask = trim(std::string_view(line).substr(kName.size()));
    std::uint64_t bits = 0;
    if (std::from_chars(mask.data(), mask.data() + mask.size(), bits, 16).ec != std::errc()) return std::nullopt;
    const auto has = [&](int capability) { return (bits >> capability & 1) != 0; };
    return Privileges{has(kIpcLock), has(kSysRawio), has(kSysAdmin)};
  }
  return std::nullopt;
}

void check_doorbell(const Patient& patient, Findings& findings) {
  bool mlx5 = false;
  for (const rdma::Nic& nic : patient.nics) mlx5 = mlx5 || nic.capability == rdma::Capability::mlx5;
  if (!mlx5 || patient.gpus.empty()) return;
  constexpr const char* kFallback =
      "the handler cpu does the same work with a thread of the host, with a higher latency";
  constexpr const char* kOption =
      "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\" in /etc/modprobe.d, update-initramfs -u, "
      "restart; or "
      "run the container privileged";
  if (patient.settings.nic_handler == rdma::NicHandler::cpu) {
    findings.push_back({"doorbell", Verdict::note, "the NIC handler is cpu by a variable",
                        "GPUs do not ring doorbells even where they could", ""});
    return;
  }
  const Verdict impossible = patient.settings.nic_handler == rdma::NicHandler::gpu ? Verdict::error : Verdict::warning;
  std::string driver;
  if (driver_is_too_old(patient, driver)) {
    findings.push_back({"doorbell", impossible, fmt::format("driver {} is older than 510.40.3", driver),
                        fmt::format("it cannot map a NIC's registers into a GPU; {}", kFallback), "update the driver"});
    return;
  }
  const bool override = peer_mapping_override(patient);
  const auto privileges = read_privileges(patient.root);
  const bool privileged = privileges && privileges->sys_admin && privileges->sys_rawio;
  if (override) {
    findings.push_back({"doorbell", Verdict::ok, "PeerMappingOverride=1: GPUs may ring doorbells",
                        "the real mapping is tried when the first connection is made; the log says how it went", ""});
  } else if (privileged) {
    findings.push_back({"doorbell", Verdict::note,
                        "PeerMappingOverride is not set, but this process is privileged (CAP_SYS_ADMIN, CAP_SYS_RAWIO)",
                        "such processes are reported to map doorbells without it; the first connection will show",
                        fmt::format("if the log then says that handler cpu was taken: {}", kOption)});
  } else {
    findings.push_back(
        {"doorbell", impossible, "PeerMappingOverride is not set, and this process is not privileged",
         fmt::format("GPUs cannot ring the doorbells of NICs (cudaHostRegister fails with 800 or 801); {}", kFallback),
         kOption});
  }
}

}  // namespace deep_ep::tools
