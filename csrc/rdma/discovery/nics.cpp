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

std::string text_of(const SystemRoot& root, const std::string& path) {
  return std::string(trim(root.read(path).value_or("")));
}

// "ACTIVE" of "4: ACTIVE".
std::string after_number(const std::string& text) { return std::string(split(text, ':').back()); }

GidType gid_type(const std::string& text, bool ethernet) {
  if (text == "RoCE v2") return GidType::roce_v2;
  if (text == "IB/RoCE v1") return ethernet ? GidType::roce_v1 : GidType::infiniband;
  return ethernet ? GidType::unknown : GidType::infiniband;
}

// 106 of "106" or "Global tclass=106", the first line; others are rules for some connections.
std::optional<std::uint8_t> traffic_class(const SystemRoot& root, const std::string& nic, int port) {
  const std::string text = text_of(root, fmt::format("{}/{}/tc/{}/traffic_class", kClass, nic, port));
  return parse_number<std::uint8_t>(split(split(text, '\n').front(), '=').back());
}

NicPort read_port(const SystemRoot& root, const std::string& folder, int number) {
  NicPort port;
  port.number = number;
  port.state = after_number(text_of(root, folder + "/state"));
  port.physical_state = after_number(text_of(root, folder + "/phys_state"));
  // "400 Gb/sec (4X NDR)"
  port.rate_gbps = parse_number<double>(split(text_of(root, folder + "/rate"), ' ').front()).value_or(0);
  port.link_layer = text_of(root, folder + "/link_layer");
  for (const std::string& index : root.list(folder + "/gids")) {
    const auto place = parse_number<int>(index);
    const auto bytes = parse_gid(text_of(root, fmt::format("{}/gids/{}", folder, index)));
    if (!bytes || !place) continue;
    GidEntry gid{.index = *place, .bytes = *bytes};
    if (gid.is_zero()) continue;
    gid.type = gid_type(text_of(root, fmt::format("{}/gid_attrs/types/{}", folder, index)), port.ethernet());
    gid.netdev = text_of(root, fmt::format("{}/gid_attrs/ndevs/{}", folder, index));
    port.gids.push_back(std::move(gid));
  }
  return port;
}

// Software NICs have no PCI device; their description says what they are.
std::string driver_of(const SystemRoot& root, const std::string& folder) {
  std::string driver = root.link_name(folder + "/device/driver");
  if (!driver.empty()) return driver;
  const std::string description = text_of(root, folder + "/node_desc");
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
  const std::string text = text_of(root, fmt::format("/sys/devices/system/node/node{}/cpulist", numa_node));
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
    if (text_of(root, fmt::format("/sys/class/infiniband_verbs/{}/ibdev", node)) == name) return node;
  }
  return {};
}

}  // namespace

const NicPort* Nic::port(int number) const {
  const auto found = std::ranges::find(ports, number, &NicPort::number);
  return found == ports.end() ? nullptr : &*found;
}

std::vector<Nic> find_nics(const SystemRoot& root) {
  std::vector<Nic> nics;
  for (const std::string& name : root.list(kClass)) {
    const std::string folder = fmt::format("{}/{}", kClass, name);
    Nic nic;
    nic.name = name;
    nic.driver = driver_of(root, folder);
    nic.node_type = after_number(text_of(root, folder + "/node_type"));
    nic.firmware = text_of(root, folder + "/fw_ver");
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
  std::stable_sort(nics.begin(), nics.end(), [](const Nic& a, const Nic& b) {
    return std::tuple(!a.pci.address, a.pci.address) < std::tuple(!b.pci.address, b.pci.address);
  });
  return nics;
}

bool is_virtual_machine(const SystemRoot& root) {
  return root.read("/proc/cpuinfo").value_or("").find(" hypervisor") != std::string::npos;
}

const char* name_of(Capability capability) {
  constexpr std::array kNames = {"mlx5: handlers gpu and cpu", "verbs: handler cpu",
                                 "not supported: no reliable connections over InfiniBand or RoCE"};
  return kNames[static_cast<std::size_t>(capability)];
}

}  // namespace deep_ep::rdma
