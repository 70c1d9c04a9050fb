#include "csrc/topology/pci.hpp"

#include <algorithm>
#include <array>
#include <filesystem>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::topology {
std::string PciAddress::text() const { return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", domain, bus, device, function); }

std::optional<PciAddress> parse_pci_address(std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  const std::vector<std::string_view> last = split(parts.back(), '.');
  if (parts.size() < 2 || parts.size() > 3 || last.size() != 2) return std::nullopt;
  const auto number = [](std::string_view digits, std::size_t most) {
    return digits.size() <= most ? parse_number<std::uint32_t>(digits, 16) : std::nullopt;
  };
  const auto domain = parts.size() == 3 ? number(parts[0], 8) : std::optional(0U);
  const auto bus = number(parts[parts.size() - 2], 2);
  const auto device = number(last[0], 2);
  const auto function = number(last[1], 1);
  if (!domain || !bus || !device || !function || *device > 31 || *function > 7) return std::nullopt;
  return PciAddress{*domain, static_cast<std::uint8_t>(*bus), static_cast<std::uint8_t>(*device),
                    static_cast<std::uint8_t>(*function)};
}

PciLocation pci_location(const SystemRoot& root, std::string_view device_folder) {
  PciLocation location;
  const auto path = root.resolve(device_folder);
  if (!path) return location;
  // /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0: host bridge, bridges, device.
  for (const auto& part : std::filesystem::path(*path)) {
    const std::string name = part.string();
    const auto address = parse_pci_address(name);
    if (address) location.address = address;
    if (location.path.empty() ? name.starts_with("pci") : address.has_value()) location.path.push_back(name);
  }
  if (!location.address) return {};
  location.numa_node = parse_number<int>(root.text(*path + "/numa_node")).value_or(-1);
  return location;
}

Distance distance(const PciLocation& a, const PciLocation& b) {
  const auto fork = std::ranges::mismatch(a.path, b.path);
  if (fork.in1 == a.path.begin()) {  // several host bridges, or not known
    if (!a.address || !b.address || a.numa_node < 0 || b.numa_node < 0) return {Proximity::unknown, 0};
    return {a.numa_node == b.numa_node ? Proximity::numa_node : Proximity::system, 0};
  }
  const auto below_a = a.path.end() - fork.in1;
  const auto below_b = b.path.end() - fork.in2;
  const int hops = static_cast<int>(below_a + below_b);
  if (fork.in1 == a.path.begin() + 1) return {Proximity::host_bridge, hops};
  // Below a switch the two meet at its upstream port: each has a downstream port of its own above it.
  const bool one_switch = below_a <= 2 && below_b <= 2;
  return {one_switch ? Proximity::same_switch : Proximity::across_switches, hops};
}

const char* short_name(Proximity proximity) {
  constexpr std::array kNames = {"PIX", "PXB", "PHB", "NODE", "SYS", "-"};
  return kNames[static_cast<std::size_t>(proximity)];
}

}  // namespace deep_ep::topology
