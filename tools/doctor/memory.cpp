// `deep_ep doctor`: how NICs come to the memory of GPUs.
#include <fmt/format.h>

#include <charconv>
#include <compare>
#include <string>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

struct Version {
  int major = 0;
  int minor = 0;
  auto operator<=>(const Version&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// "6.14.0-1021-gcp", "580.126.09".
Version parse_version(const std::string& text) {
  Version version;
  const char* end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, version.major);
  if (major.ptr != end && *major.ptr == '.') std::from_chars(major.ptr + 1, end, version.minor);
  return version;
}

// Kernels from 5.12 on register dma-bufs, NVIDIA's driver exports them from 515 on, the open kernel modules alone.
constexpr Version kFirstKernel = {5, 12};
constexpr Version kFirstDmaBufDriver = {515, 0};

// Empty: it should work.
std::string why_no_dma_buf(const Patient& patient) {
  const std::string kernel = patient.root.read("/proc/sys/kernel/osrelease").value_or("");
  const std::string driver = patient.root.read("/sys/module/nvidia/version").value_or("");
  const std::string description = patient.root.read("/proc/driver/nvidia/version").value_or("");
  if (!kernel.empty() && parse_version(kernel) < kFirstKernel)
    return fmt::format("kernel {} is older than 5.12", kernel);
  if (!driver.empty() && parse_version(driver) < kFirstDmaBufDriver)
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
    if (const auto version = patient.root.read(file)) return fmt::format("nvidia-peermem {}", *version);
  }
  return patient.root.exists("/sys/module/nvidia_peermem") ? "nvidia-peermem" : "";
}

void check_gpu_memory(const Patient& patient, Findings& findings) {
  const std::string reason = why_no_dma_buf(patient);
  const std::string peer_memory = find_peer_memory(patient);
  if (reason.empty()) {
    findings.push_back({"registration", Verdict::ok,
                        fmt::format("GPU memory should be registered as dma-buf{}",
                                    peer_memory.empty() ? "" : fmt::format("; {} is available, too", peer_memory)),
                        "the first registration decides; the log says which way was taken", ""});
  } else if (!peer_memory.empty()) {
    findings.push_back({"registration", Verdict::ok, fmt::format("GPU memory is registered through {}", peer_memory),
                        fmt::format("dma-buf is not used: {}", reason), ""});
  } else {
    findings.push_back({"registration", Verdict::error,
                        fmt::format("neither dma-buf ({}) nor a peer memory module is available", reason),
                        "NICs cannot read or write GPU memory: registration fails with EFAULT or EOPNOTSUPP",
                        "use the driver with open kernel modules, 515 or later, or load the module nvidia-peermem"});
  }
}

}  // namespace

void check_registration(const Patient& patient, Findings& findings) {
  if (!patient.nics.empty() && !patient.gpus.empty()) check_gpu_memory(patient, findings);
}

}  // namespace deep_ep::tools
