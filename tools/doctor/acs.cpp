// `deep_ep doctor`: whether PCIe bridges send transfers between GPU and NIC up to the CPU first (Access Control
// Services).
#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::size_t kExtended = 0x100;  // the extended capabilities begin here; only root may read them
constexpr std::uint16_t kAcs = 0x000d;
constexpr std::size_t kAcsControl = 6;
constexpr std::uint16_t kRedirects = 0x0004 | 0x0008;  // requests, completions

std::uint32_t word_at(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4 && at + i < bytes.size(); ++i) {
    value |= std::uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  }
  return value;
}

// Nothing where the capabilities cannot be read.
std::optional<bool> redirects(const std::string& config) {
  if (config.size() <= kExtended) return std::nullopt;
  std::set<std::size_t> seen;
  for (std::size_t at = kExtended; at >= kExtended && at + 8 <= config.size() && seen.insert(at).second;) {
    const std::uint32_t header = word_at(config, at);
    if ((header & 0xffff) == kAcs) return (word_at(config, at + kAcsControl) & kRedirects) != 0;
    at = header >> 20;
  }
  return false;
}

}  // namespace

void check_acs(const Patient& patient, Findings& findings) {
  std::set<topology::PciAddress> bridges;
  for (std::size_t gpu = 0; gpu < patient.map.rows.size(); ++gpu) {
    const rdma::NicMapRow& row = patient.map.rows[gpu];
    if (!row.port || row.distance.proximity > topology::Proximity::across_switches)
      continue;  // the CPU is on the way anyhow
    const auto& above_gpu = patient.map.gpus[gpu].pci.bridges;
    const auto& above_nic = patient.map.nics[row.port->nic].pci.bridges;
    bridges.insert(above_gpu.begin(), above_gpu.end());
    bridges.insert(above_nic.begin(), above_nic.end());
  }
  std::string redirecting;
  std::size_t readable = 0;
  for (const topology::PciAddress& bridge : bridges) {
    const auto redirected =
        redirects(patient.root.read_bytes(fmt::format("/sys/bus/pci/devices/{}/config", bridge.text()), 4096));
    readable += redirected ? 1 : 0;
    if (redirected.value_or(false)) redirecting += fmt::format("{}{}", redirecting.empty() ? "" : ", ", bridge.text());
  }
  if (!redirecting.empty()) {
    findings.push_back(
        {"acs", Verdict::warning, fmt::format("ACS redirects transfers at {}", redirecting),
         "what a NIC reads or writes in its GPU goes up to the CPU and back: half the rate or less, unless "
         "the NIC translates addresses itself (ATS)",
         "on bare metal, ACS off in the BIOS, or setpci -s BRIDGE ECAP_ACS+6.w=0000; in virtual machines the "
         "host decides, and ATS must be on"});
  } else if (readable > 0) {
    findings.push_back(
        {"acs", Verdict::ok, fmt::format("none of {} PCIe bridges redirects transfers (ACS)", readable), "", ""});
  }
}

}  // namespace deep_ep::tools
