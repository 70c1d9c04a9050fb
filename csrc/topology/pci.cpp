#include "csrc/topology/pci.hpp"

#include <algorithm>
#include <array>
#include <filesystem>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::topology {
namespace {

struct ProximityName {
  Proximity proximity;
  const char* short_name;
  const char* explanation;
};

constexpr std::array kNames = {
    ProximityName{Proximity::same_switch, "PIX", "same PCIe switch"},
    ProximityName{Proximity::across_switches, "PXB", "across PCIe switches"},
    ProximityName{Proximity::host_bridge, "PHB", "through the CPU's PCIe host bridge"},
    ProximityName{Proximity::numa_node, "NODE", "between host bridges of one NUMA node"},
    ProximityName{Proximity::system, "SYS", "across NUMA nodes"},
    ProximityName{Proximity::unknown, "-", "not known"},
};

const ProximityName& name_of(Proximity proximity) {
  return *std::find_if(kNames.begin(), kNames.end(), [&](const auto& name) { return name.proximity == proximity; });
}

// One hexadecimal number of at most `digits` digits, which is removed from `text` together with the separator after it.
std::optional<std::uint32_t> take_number(std::string_view& text, char separator, std::size_t digits) {
  const std::size_t end = separator == '\0' ? text.size() : text.find(separator);
  if (end == std::string_view::npos || end == 0 || end > digits) return std::nullopt;
  const auto value = parse_number<std::uint32_t>(text.substr(0, end), 16);
  if (value) text.remove_prefix(separator == '\0' ? end : end + 1);
  return value;
}

}  // namespace

std::string PciAddress::text() const { return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", domain, bus, device, function); }

std::optional<PciAddress> parse_pci_address(std::string_view text) {
  PciAddress address;
  if (std::count(text.begin(), text.end(), ':') == 2) {
    const auto domain = take_number(text, ':', 8);
    if (!domain) return std::nullopt;
    address.domain = *domain;
  }
  const auto bus = take_number(text, ':', 2);
  const auto device = bus ? take_number(text, '.', 2) : std::nullopt;
  const auto function = device ? take_number(text, '\0', 1) : std::nullopt;
  if (!function || *device > 31 || *function > 7) return std::nullopt;
  address.bus = static_cast<std::uint8_t>(*bus);
  address.device = static_cast<std::uint8_t>(*device);
  address.function = static_cast<std::uint8_t>(*function);
  return address;
}

PciLocation pci_location(const SystemRoot& root, std::string_view device_folder) {
  PciLocation location;
  const auto path = root.resolve(device_folder);
  if (!path) return location;
  // /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0: host bridge, bridges, device.
  for (const auto& part : std::filesystem::path(*path)) {
    const std::string name = part.string();
    if (const auto address = parse_pci_address(name)) {
      location.bridges.push_back(*address);
    } else if (location.bridges.empty() && name.starts_with("pci") && name.find(':') != std::string::npos) {
      location.host_bridge = name;
    }
  }
  if (location.bridges.empty()) return {};
  location.address = location.bridges.back();
  location.bridges.pop_back();
  if (const auto numa_node = root.read(*path + "/numa_node")) {
    location.numa_node = parse_number<int>(*numa_node).value_or(-1);
  }
  return location;
}

Distance distance(const PciLocation& a, const PciLocation& b) {
  if (!a.address || !b.address) return {Proximity::unknown, 0};
  if (a.host_bridge != b.host_bridge || a.host_bridge.empty()) {
    if (a.numa_node < 0 || b.numa_node < 0) return {Proximity::unknown, 0};
    return {a.numa_node == b.numa_node ? Proximity::numa_node : Proximity::system, 0};
  }
  const auto fork = std::mismatch(a.bridges.begin(), a.bridges.end(), b.bridges.begin(), b.bridges.end());
  const auto below_a = a.bridges.end() - fork.first + 1;
  const auto below_b = b.bridges.end() - fork.second + 1;
  const int hops = static_cast<int>(below_a + below_b);
  if (fork.first == a.bridges.begin()) return {Proximity::host_bridge, hops};
  // Below a switch the two meet at its upstream port: each has a downstream port of its own above it.
  const bool one_switch = below_a <= 2 && below_b <= 2;
  return {one_switch ? Proximity::same_switch : Proximity::across_switches, hops};
}

const char* short_name(Proximity proximity) { return name_of(proximity).short_name; }

const char* explanation(Proximity proximity) { return name_of(proximity).explanation; }

}  // namespace deep_ep::topology
