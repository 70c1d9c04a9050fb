// `deep_ep doctor`: how NICs come to the memory of GPUs, and GPUs to the doorbells of NICs.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

// Kernels from 5.12 on register dma-bufs, NVIDIA's driver exports them from 515 on, the open kernel modules alone.
// Drivers from 510.40.3 on map the registers of other PCI devices into a GPU's address space.
constexpr double kFirstKernel = 5.012;
constexpr int kFirstDmaBufDriver = 515;
constexpr int kFirstDoorbellDriver = 510;

/// "6.14.0-1021-gcp" is 6.014: later ones are larger.
double kernel_release(const std::string& text) {
  const std::size_t dot = text.find('.');
  return dot == std::string::npos ? 0 : major_of(text) + major_of(text.substr(dot + 1)) / 1000.0;
}

// Empty: it should work.
std::string why_no_dma_buf(const Patient& patient) {
  const std::string kernel = patient.root.text("/proc/sys/kernel/osrelease");
  const std::string driver = patient.root.text("/sys/module/nvidia/version");
  const std::string description = patient.root.text("/proc/driver/nvidia/version");
  if (!kernel.empty() && kernel_release(kernel) < kFirstKernel)
    return fmt::format("kernel {} is older than 5.12", kernel);
  if (!driver.empty() && major_of(driver) < kFirstDmaBufDriver)
    return fmt::format("driver {} is older than 515", driver);
  if (!description.empty() && description.find("Open Kernel Module") == std::string::npos) {
    return "the driver is not the one with open kernel modules";
  }
  if (!patient.settings.dma_buf) return "a variable switches it off";
  return {};
}

std::string find_peer_memory(const Patient& patient) {
  for (const char* file : {"/sys/kernel/mm/memory_peers/nvidia-peermem/version",
                           "/sys/kernel/mm/memory_peers/nv_mem/version", "/sys/module/nvidia_peermem/version"}) {
    const std::string version = patient.root.text(file);
    if (!version.empty()) return fmt::format("nvidia-peermem {}", version);
  }
  return patient.root.exists("/sys/module/nvidia_peermem") ? "nvidia-peermem" : "";
}

}  // namespace

std::uint64_t capabilities_of_process(const topology::SystemRoot& root) {
  return parse_number<std::uint64_t>(rest_of_line(root.text("/proc/self/status"), "CapEff:"), 16).value_or(0);
}

void check_registration(const Patient& patient, Findings& findings) {
  if (patient.nics.empty() || patient.gpus.empty()) return;
  const std::string reason = why_no_dma_buf(patient);
  const std::string peer_memory = find_peer_memory(patient);
  if (reason.empty()) {
    findings.push_back({"registration", Verdict::ok,
                        fmt::format("GPU memory should be registered as dma-buf{}",
                                    peer_memory.empty() ? "" : fmt::format("; {} is available, too", peer_memory)),
                        "the first registration decides; the log says which way was taken"});
  } else if (!peer_memory.empty()) {
    findings.push_back({"registration", Verdict::ok, fmt::format("GPU memory is registered through {}", peer_memory),
                        fmt::format("dma-buf is not used: {}", reason)});
  } else {
    findings.push_back({"registration", Verdict::error,
                        fmt::format("neither dma-buf ({}) nor a peer memory module is available", reason),
                        "NICs cannot read or write GPU memory: registration fails with EFAULT or EOPNOTSUPP",
                        "use the driver with open kernel modules, 515 or later, or load the module nvidia-peermem"});
  }
}

void check_doorbell(const Patient& patient, Findings& findings) {
  const bool mlx5 =
      std::ranges::any_of(patient.nics, [](const rdma::Nic& nic) { return nic.capability == rdma::Capability::mlx5; });
  if (!mlx5 || patient.gpus.empty()) return;
  constexpr const char* kFallback = "the handler doorbell rings with a thread of the host, with a higher latency";
  constexpr const char* kOption =
      "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\" in /etc/modprobe.d, update-initramfs -u, "
      "restart; or run the container privileged";
  if (patient.settings.nic_handler > rdma::NicHandler::gpu) {
    findings.push_back({"doorbell", Verdict::note,
                        fmt::format("the NIC handler is {} by a variable", name_of(patient.settings.nic_handler)),
                        "GPUs do not ring doorbells even where they could"});
    return;
  }
  const Verdict impossible = patient.settings.nic_handler == rdma::NicHandler::gpu ? Verdict::error : Verdict::warning;
  const std::string driver = patient.root.text("/sys/module/nvidia/version");
  const std::string params = patient.root.text("/proc/driver/nvidia/params");
  constexpr std::uint64_t kPrivileged = std::uint64_t{1} << 17 | std::uint64_t{1} << 21;  // CAP_SYS_RAWIO, _ADMIN
  if (!driver.empty() && major_of(driver) < kFirstDoorbellDriver) {
    findings.push_back({"doorbell", impossible, fmt::format("driver {} is older than 510.40.3", driver),
                        fmt::format("it cannot map a NIC's registers into a GPU; {}", kFallback), "update the driver"});
  } else if (params.find("PeerMappingOverride=1") != std::string::npos) {
    findings.push_back({"doorbell", Verdict::ok, "PeerMappingOverride=1: GPUs may ring doorbells",
                        "the real mapping is tried when the first connection is made; the log says how it went"});
  } else if ((capabilities_of_process(patient.root) & kPrivileged) == kPrivileged) {
    findings.push_back({"doorbell", Verdict::note,
                        "PeerMappingOverride is not set, but this process is privileged (CAP_SYS_ADMIN, CAP_SYS_RAWIO)",
                        "such processes are reported to map doorbells without it; the first connection will show",
                        fmt::format("if the log then says that another handler was taken: {}", kOption)});
  } else {
    findings.push_back(
        {"doorbell", impossible, "PeerMappingOverride is not set, and this process is not privileged",
         fmt::format("GPUs cannot ring the doorbells of NICs (cudaHostRegister fails with 800 or 801); {}", kFallback),
         kOption});
  }
}

}  // namespace deep_ep::tools
