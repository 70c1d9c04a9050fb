// Where a device sits in the PCI tree, and how far two devices are from each other.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/topology/system_root.hpp"

namespace deep_ep::topology {

/// "0000:18:00.0": domain, bus, device and function, hexadecimal.
struct PciAddress {
  std::uint32_t domain = 0;  ///< VMs and NVIDIA's driver use up to 32 bits
  std::uint8_t bus = 0;
  std::uint8_t device = 0;
  std::uint8_t function = 0;

  auto operator<=>(const PciAddress&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
  std::string text() const;
};

/// Reads "18:00.0", "0000:18:00.0" and "00000000:18:00.0", in upper or lower case.
std::optional<PciAddress> parse_pci_address(std::string_view text);

struct PciLocation {
  std::optional<PciAddress> address;  ///< nothing for devices that are not on PCI (software NICs)
  /// "pci0000:16", the CPU's host bridge; then addresses from the root port down to the device itself.
  std::vector<std::string> path;
  int numa_node = -1;  ///< -1: unknown
};

/// `device_folder`: a folder or link in sysfs that is a PCI device ("/sys/bus/pci/devices/0000:18:00.0",
/// "/sys/class/infiniband/mlx5_0/device"). An empty location if it is not on PCI.
PciLocation pci_location(const SystemRoot& root, std::string_view device_folder);

/// What a transfer between two devices passes through, nearest first. The short names are those of `nvidia-smi topo
/// -m`.
enum class Proximity : std::uint8_t {
  same_switch,      ///< PIX: one PCIe switch at most
  across_switches,  ///< PXB: several switches, but not the CPU
  host_bridge,      ///< PHB: the CPU's PCIe host bridge
  numa_node,        ///< NODE: several host bridges of one NUMA node
  system,           ///< SYS: the link between NUMA nodes
  unknown,          ///< at least one device is not on PCI, or the kernel does not say
};

struct Distance {
  Proximity proximity = Proximity::unknown;
  int hops = 0;  ///< links of the PCI tree from one to the other, counted where they meet below the CPU

  bool operator==(const Distance&) const = default;
};

Distance distance(const PciLocation& a, const PciLocation& b);

const char* short_name(Proximity proximity);  ///< "PIX"

}  // namespace deep_ep::topology
