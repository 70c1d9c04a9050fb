#include "csrc/rdma/discovery/nics.hpp"

#include <algorithm>
#include <array>
#include <tuple>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::rdma {
namespace {

using topology::SystemRoot;

constexpr std::string_view kClass = "/sys/class/infiniband";

// "ACTIVE" of "4: ACTIVE".
std::string after_number(const std::string& text) { return std::string(split(text, ':').back()); }

// 106 of "106" or "Global tclass=106", the first line; others are rules for some connections.
std::optional<std::uint8_t> traffic_class(const SystemRoot& root, const std::string& nic, int port) {
  const std::string text = root.text(fmt::format("{}/{}/tc/{}/traffic_class", kClass, nic, port));
  return parse_number<std::uint8_t>(split(split(text, '\n').front(), '=').back());
}

NicPort read_port(const SystemRoot& root, const std::string& folder, int number) {
  NicPort port;
  port.number = number;
  port.state = after_number(root.text(folder + "/state"));
  port.physical_state = after_number(root.text(folder + "/phys_state"));
  // "400 Gb/sec (4X NDR)"
  port.rate_gbps = parse_number<double>(split(root.text(folder + "/rate"), ' ').front()).value_or(0);
  port.link_layer = root.text(folder + "/link_layer");
  for (const std::string& index : root.list(folder + "/gids")) {
    const auto place = parse_number<int>(index);
    const auto bytes = parse_gid(root.text(fmt::format("{}/gids/{}", folder, index)));
    if (!bytes || !place) continue;
    GidEntry gid{.index = *place, .bytes = *bytes};
    if (gid.is_zero()) continue;
    gid.type = port.ethernet() ? root.text(fmt::format("{}/gid_attrs/types/{}", folder, index)) : "InfiniBand";
    gid.netdev = root.text(fmt::format("{}/gid_attrs/ndevs/{}", folder, index));
    port.gids.push_back(std::move(gid));
  }
  return port;
}

// Software NICs have no PCI device; their description says what they are.
std::string driver_of(const SystemRoot& root, const std::string& folder) {
  std::string driver = root.link_name(folder + "/device/driver");
  if (!driver.empty()) return driver;
  const std::string description = root.text(folder + "/node_desc");
  if (description == "rxe") return "rdma_rxe";
  if (description.starts_with("Software iWARP")) return "siw";
  return {};
}

Capability capability_of(const Nic& nic) {
  // Only channel adapters (IB, RoCE) connect queue pairs by address; RNICs (iWARP) need a connection manager.
  if (nic.node_type != "CA") return Capability::unsupported;
  return nic.driver == "mlx5_core" ? Capability::mlx5 : Capability::verbs;
}

// "0-3,8" as numbers.
std::vector<int> cpus_near(const SystemRoot& root, int numa_node) {
  std::vector<int> cpus;
  if (numa_node < 0) return cpus;
  const std::string text = root.text(fmt::format("/sys/devices/system/node/node{}/cpulist", numa_node));
  for (const std::string_view range : split(text, ',')) {
    const std::vector<std::string_view> ends = split(range, '-');
    const auto first = parse_number<int>(ends.front());
    const auto last = parse_number<int>(ends.back());
    for (int cpu = first.value_or(0); first && last && cpu <= *last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::string uverbs_of(const SystemRoot& root, const std::string& name) {
  for (const std::string& node : root.list("/sys/class/infiniband_verbs")) {
    if (root.text(fmt::format("/sys/class/infiniband_verbs/{}/ibdev", node)) == name) return node;
  }
  return {};
}

}  // namespace

std::vector<Nic> find_nics(const SystemRoot& root) {
  std::vector<Nic> nics;
  for (const std::string& name : root.list(kClass)) {
    const std::string folder = fmt::format("{}/{}", kClass, name);
    Nic nic;
    nic.name = name;
    nic.driver = driver_of(root, folder);
    nic.node_type = after_number(root.text(folder + "/node_type"));
    nic.firmware = root.text(folder + "/fw_ver");
    nic.uverbs = uverbs_of(root, name);
    nic.accessible = !nic.uverbs.empty() && root.writable("/dev/infiniband/" + nic.uverbs);
    nic.virtual_function = root.exists(folder + "/device/physfn");
    nic.pci = topology::pci_location(root, folder + "/device");
    for (const std::string& entry : root.list(folder + "/ports")) {
      const auto number = parse_number<int>(entry);
      if (!number) continue;
      nic.ports.push_back(read_port(root, fmt::format("{}/ports/{}", folder, entry), *number));
      if (nic.ports.back().ethernet()) nic.ports.back().traffic_class = traffic_class(root, name, *number);
    }
    nic.cpus = cpus_near(root, nic.pci.numa_node);
    nic.capability = capability_of(nic);
    nics.push_back(std::move(nic));
  }
  // Stable: devices without an address stay in the natural order of their names.
  std::ranges::stable_sort(nics, {}, [](const Nic& nic) { return std::tuple(!nic.pci.address, nic.pci.address); });
  return nics;
}

bool is_virtual_machine(const SystemRoot& root) {
  return root.text("/proc/cpuinfo").find(" hypervisor") != std::string::npos;
}

const char* name_of(Capability capability) {
  constexpr std::array kNames = {"mlx5: handlers gpu and cpu", "verbs: handler cpu",
                                 "not supported: no reliable connections over InfiniBand or RoCE"};
  return kNames[static_cast<std::size_t>(capability)];
}

}  // namespace deep_ep::rdma
