#include "csrc/rdma/discovery/machine.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

void log_map(const NicMap& map) {
  for (std::size_t gpu = 0; gpu < map.rows.size(); ++gpu) log::info("rdma: {}", map.line(gpu));
  for (const std::string& nic : map.unused) log::info("rdma: not used: {}", nic);
  for (const std::string& warning : map.warnings) log::warn("rdma: {}", warning);
}

}  // namespace

const NicMap& machine_nic_map() {
  // Never destroyed: threads that outlive main() may still ask.
  static const NicMap* map = [] {
    const topology::SystemRoot root;
    const RdmaSettings settings = read_settings();
    auto* made = new NicMap(map_gpus_to_nics(topology::find_gpus(root), find_nics(root), settings));
    if (!settings.taken.empty()) log::info("rdma: in effect: {}", fmt::join(settings.taken, ", "));
    log_map(*made);
    return made;
  }();
  return *map;
}

std::string why_no_rdma(const NicMap& map) {
  if (map.nics.empty()) {
    return "this machine has no RDMA device (/sys/class/infiniband is empty or missing): load the driver of its NIC, "
           "or "
           "give the container its devices";
  }
  if (std::any_of(map.rows.begin(), map.rows.end(), [](const NicMapRow& row) { return row.port.has_value(); }))
    return {};
  return fmt::format("no RDMA device of this machine can be used: {}", fmt::join(map.unused, "; "));
}

NicAssignment assignment_of(const NicMap& map, std::size_t gpu) {
  const NicMapRow& row = map.rows.at(gpu);
  if (!row.port) {
    const std::string reason = why_no_rdma(map);
    fail<SystemError>("RDMA was asked for, but {}. `deep_ep doctor` says more",
                      reason.empty() || row.problem.starts_with("DEEP_EP_")
                          ? fmt::format("{} has no NIC: {}", map.gpus[gpu].text(), row.problem)
                          : reason);
  }
  const Nic& nic = map.nics[row.port->nic];
  const NicPort& port = *nic.port(row.port->port);
  return {nic.name,           row.port->port, row.port->gid.index, row.port->gid.bytes,
          port.ethernet(),    port.rate_gbps, nic.capability,      row.distance,
          port.traffic_class, nic.cpus,       nic.pci.numa_node};
}

NicAssignment nic_of_cuda_device(int ordinal) {
  const NicMap& map = machine_nic_map();
  if (map.nics.empty()) fail<SystemError>("RDMA was asked for, but {}. `deep_ep doctor` says more", why_no_rdma(map));
  const auto address = topology::cuda_device_address(ordinal);
  const auto gpu = std::find_if(map.gpus.begin(), map.gpus.end(), [&](const topology::Gpu& candidate) {
    return address && candidate.pci.address == address;
  });
  if (gpu == map.gpus.end()) {
    fail<SystemError>("RDMA was asked for, but {}",
                      address ? fmt::format("the GPU at {} (CUDA device {}) is neither in /proc/driver/nvidia/gpus nor "
                                            "in /sys/bus/pci/devices",
                                            address->text(), ordinal)
                              : fmt::format("CUDA does not say where its device {} is", ordinal));
  }
  return assignment_of(map, static_cast<std::size_t>(gpu - map.gpus.begin()));
}

bool nics_are_on_ethernet(const topology::SystemRoot& root, const environment::Source& source) noexcept {
  try {
    const WireKind wire = read_settings(source).wire.kind;
    if (wire != WireKind::automatic && wire != WireKind::verbs) return false;
    const std::vector<Nic> nics = find_nics(root);
    return std::any_of(nics.begin(), nics.end(), [](const Nic& nic) {
      return nic.pci.address && nic.capability != Capability::unsupported &&
             std::any_of(nic.ports.begin(), nic.ports.end(),
                         [](const NicPort& port) { return port.active() && port.ethernet(); });
    });
  } catch (const std::exception&) {
    return false;
  }
}

NicAssignment nic_of_host_rank(int local_rank, int local_ranks) {
  if (local_rank < 0 || local_rank >= local_ranks) {
    fail<InvalidArgument>("local rank is {}, allowed: 0 to {}", local_rank, local_ranks - 1);
  }
  const NicMap map = map_gpus_to_nics(ranks_without_gpu(local_ranks), find_nics({}), read_settings());
  if (local_rank == 0) log_map(map);
  return assignment_of(map, static_cast<std::size_t>(local_rank));
}

}  // namespace deep_ep::rdma
