#include "csrc/rdma/discovery/nic_map.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "csrc/rdma/discovery/assignment.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma {
namespace {

using topology::Distance;
using topology::Gpu;
using topology::Proximity;

// Costs of the assignment, from what decides first to what decides last: sharing a NIC, distance, a second function of
// one card (its ports share the card's PCIe link), order. Each step is larger than any sum of the steps below it.
constexpr std::int64_t kPerSharer = std::int64_t{1} << 44;
constexpr std::int64_t kPerDistance = std::int64_t{1} << 26;
constexpr std::int64_t kPerFunction = std::int64_t{1} << 16;

std::int64_t distance_cost(const Distance& distance) {
  // The worse a link, the more nearer ones it takes to outweigh it; hops distinguish equal links.
  switch (distance.proximity) {
    case Proximity::same_switch:
      return distance.hops;
    case Proximity::across_switches:
      return 32 + distance.hops;
    case Proximity::host_bridge:
      return 64 + distance.hops;
    case Proximity::numa_node:
      return 128;
    case Proximity::system:
      return 512;
    case Proximity::unknown:
      break;
  }
  return 512;
}

std::string port_name(const Nic& nic, int port) { return fmt::format("{} port {}", nic.name, port); }

// Why this port cannot be used at all; otherwise empty, and `usable` is filled.
std::string check_port(const Nic& nic, const NicPort& port, const GidPolicy& policy, UsablePort& usable,
                       std::vector<std::string>& warnings) {
  if (nic.capability == Capability::unsupported) return name_of(nic.capability);
  if (!nic.accessible) {
    return nic.uverbs.empty() ? "it has no device file in /dev/infiniband (is ib_uverbs loaded?)"
                              : fmt::format("/dev/infiniband/{} cannot be opened", nic.uverbs);
  }
  if (!port.active()) {
    return fmt::format("port {} is {} (link: {})", port.number, port.state.empty() ? "in no known state" : port.state,
                       port.physical_state.empty() ? "not known" : port.physical_state);
  }
  const GidChoice choice = choose_gid(port.gids, port.ethernet(), policy);
  if (!choice.gid) return fmt::format("port {}: {}", port.number, choice.problem);
  if (!choice.warning.empty()) warnings.push_back(fmt::format("{}: {}", port_name(nic, port.number), choice.warning));
  usable.port = port.number;
  usable.gid = *choice.gid;
  return {};
}

class Mapper {
 public:
  Mapper(std::vector<Gpu> gpus, std::vector<Nic> nics, const RdmaSettings& settings) : settings_(settings) {
    map_.gpus = std::move(gpus);
    map_.nics = std::move(nics);
    map_.rows.resize(map_.gpus.size());
    map_.warnings = settings.warnings;
  }

  NicMap run() {
    if (settings_.mapping.empty()) {
      find_candidates();
      assign();
    } else {
      apply_mapping();
    }
    for (std::size_t gpu = 0; gpu < map_.gpus.size(); ++gpu) {
      NicMapRow& row = map_.rows[gpu];
      if (row.port) row.distance = topology::distance(map_.gpus[gpu].pci, map_.nics[row.port->nic].pci);
    }
    list_unused();
    warn_of_sharing();
    warn_of_distance();
    return std::move(map_);
  }

 private:
  std::string nic_names() const {
    std::string names;
    for (const Nic& nic : map_.nics) names += fmt::format("{}{}", names.empty() ? "" : ", ", nic.name);
    return names.empty() ? "none" : names;
  }

  // --- the operator's mapping ---

  std::optional<std::size_t> find_gpu(const MappingEntry& entry) const {
    if (!entry.cuda_id) return topology::find_by_uuid(map_.gpus, entry.uuid);
    for (std::size_t i = 0; i < map_.gpus.size(); ++i) {
      if (map_.gpus[i].cuda_id == entry.cuda_id) return i;
    }
    return std::nullopt;
  }

  void apply_mapping() {
    std::vector<const MappingEntry*> entry_of(map_.gpus.size());
    for (const MappingEntry& entry : settings_.mapping) {
      const auto gpu = find_gpu(entry);
      if (!gpu) {
        map_.warnings.push_back(
            fmt::format("DEEP_EP_DEVICE_TO_HCA_MAPPING: '{}' names no GPU of this machine", entry.text));
      } else if (entry_of[*gpu] != nullptr) {
        map_.rows[*gpu] = {};
        map_.rows[*gpu].problem = fmt::format("DEEP_EP_DEVICE_TO_HCA_MAPPING names it twice: '{}' and '{}'",
                                              entry_of[*gpu]->text, entry.text);
      } else {
        entry_of[*gpu] = &entry;
        apply_entry(entry, map_.rows[*gpu]);
      }
    }
    for (std::size_t gpu = 0; gpu < map_.gpus.size(); ++gpu) {
      if (entry_of[gpu] == nullptr) map_.rows[gpu].problem = "DEEP_EP_DEVICE_TO_HCA_MAPPING does not name it";
    }
  }

  void apply_entry(const MappingEntry& entry, NicMapRow& row) {
    const auto nic =
        std::find_if(map_.nics.begin(), map_.nics.end(), [&](const Nic& n) { return n.name == entry.hca; });
    const auto refuse = [&](const std::string& reason) {
      row.problem = fmt::format("DEEP_EP_DEVICE_TO_HCA_MAPPING: '{}': {}", entry.text, reason);
    };
    if (nic == map_.nics.end()) {
      return refuse(fmt::format("there is no HCA '{}'; HCAs of this machine: {}", entry.hca, nic_names()));
    }
    const NicPort* port = nic->port(entry.port);
    if (port == nullptr) {
      return refuse(fmt::format("{} has {} port{}, no port {}", nic->name, nic->ports.size(),
                                nic->ports.size() == 1 ? "" : "s", entry.port));
    }
    UsablePort usable;
    usable.nic = static_cast<std::size_t>(nic - map_.nics.begin());
    const std::string reason = check_port(*nic, *port, settings_.gid, usable, map_.warnings);
    if (!reason.empty()) return refuse(fmt::format("{}: {}", nic->name, reason));
    row.port = usable;
    row.from_mapping = true;
  }

  // --- the automatic choice ---

  double rate(const UsablePort& candidate) const { return map_.nics[candidate.nic].port(candidate.port)->rate_gbps; }

  void find_candidates() {
    for (std::size_t i = 0; i < map_.nics.size(); ++i) {
      const Nic& nic = map_.nics[i];
      if (nic.ports.empty()) reasons_[i] = "it has no port";
      for (const NicPort& port : nic.ports) {
        if (!settings_.nics.allows(nic.name, port.number)) {
          reasons_.try_emplace(i,
                               fmt::format("{}={} does not allow it", settings_.nics.source(), settings_.nics.text()));
          continue;
        }
        UsablePort usable;
        usable.nic = i;
        const std::string reason = check_port(nic, port, settings_.gid, usable, map_.warnings);
        if (reason.empty()) {
          candidates_.push_back(usable);
          reasons_.erase(i);
          break;  // one port per NIC: ports of one device share its PCIe link
        }
        reasons_[i] = reason;
      }
    }
    if (settings_.nics.is_set() || candidates_.empty()) return;
    double fastest = 0;
    for (const UsablePort& candidate : candidates_) fastest = std::max(fastest, rate(candidate));
    std::erase_if(candidates_, [&](const UsablePort& candidate) {
      if (rate(candidate) == 0 || rate(candidate) * 2 >= fastest) return false;
      reasons_[candidate.nic] = fmt::format(
          "{} Gb/s where others have {} Gb/s: taken for a storage or management NIC; DEEP_EP_HCA_LIST may "
          "name it",
          rate(candidate), fastest);
      return true;
    });
  }

  // GPUs that need a NIC. Those of other containers take part only if there is a NIC for each: a container that was
  // given a few NICs has them for itself.
  std::vector<std::size_t> rivals() const {
    std::vector<std::size_t> gpus;
    for (std::size_t i = 0; i < map_.gpus.size(); ++i) {
      if (map_.gpus[i].cuda_id || candidates_.size() >= map_.gpus.size()) gpus.push_back(i);
    }
    return gpus;
  }

  // How many usable NICs of the same card come before this one.
  std::int64_t function_rank(std::size_t candidate) const {
    const auto card = [&](std::size_t i) {
      const auto& address = map_.nics[candidates_[i].nic].pci.address;
      return address ? std::optional(std::tuple(address->domain, address->bus, address->device)) : std::nullopt;
    };
    std::int64_t rank = 0;
    for (std::size_t i = 0; i < candidate; ++i) rank += card(i) && card(i) == card(candidate) ? 1 : 0;
    return rank;
  }

  void assign() {
    const std::vector<std::size_t> gpus = rivals();
    if (candidates_.empty()) {
      for (NicMapRow& row : map_.rows) row.problem = "there is no usable NIC";
      return;
    }
    const std::size_t sharers = (gpus.size() + candidates_.size() - 1) / candidates_.size();
    std::vector<std::vector<std::int64_t>> cost(gpus.size());
    for (std::size_t row = 0; row < gpus.size(); ++row) {
      for (std::size_t sharer = 0; sharer < sharers; ++sharer) {
        for (std::size_t c = 0; c < candidates_.size(); ++c) {
          const auto away = static_cast<std::int64_t>(row) - static_cast<std::int64_t>(c + sharer * candidates_.size());
          cost[row].push_back(static_cast<std::int64_t>(sharer) * kPerSharer +
                              distance_cost(distance(gpus[row], c)) * kPerDistance + function_rank(c) * kPerFunction +
                              away * away);
        }
      }
    }
    const std::vector<std::size_t> columns = cheapest_assignment(cost);
    for (NicMapRow& row : map_.rows) row.problem = "it belongs to another container";
    for (std::size_t row = 0; row < gpus.size(); ++row) {
      map_.rows[gpus[row]].port = candidates_[columns[row] % candidates_.size()];
      map_.rows[gpus[row]].problem.clear();
    }
  }

  Distance distance(std::size_t gpu, std::size_t candidate) const {
    return topology::distance(map_.gpus[gpu].pci, map_.nics[candidates_[candidate].nic].pci);
  }

  // --- what to tell ---

  void list_unused() {
    for (std::size_t i = 0; i < map_.nics.size(); ++i) {
      const bool used = std::any_of(map_.rows.begin(), map_.rows.end(),
                                    [&](const NicMapRow& row) { return row.port && row.port->nic == i; });
      if (used) continue;
      const auto reason = reasons_.find(i);
      map_.unused.push_back(fmt::format("{}: {}", map_.nics[i].name,
                                        reason != reasons_.end() ? reason->second
                                        : settings_.mapping.empty()
                                            ? "all GPUs have a NIC already"
                                            : "DEEP_EP_DEVICE_TO_HCA_MAPPING does not name it"));
    }
  }

  void warn_of_sharing() {
    std::map<std::pair<std::size_t, int>, std::vector<std::size_t>> users;
    for (std::size_t gpu = 0; gpu < map_.rows.size(); ++gpu) {
      if (const auto& port = map_.rows[gpu].port) users[{port->nic, port->port}].push_back(gpu);
    }
    for (const auto& [key, gpus] : users) {
      if (gpus.size() < 2) continue;
      std::string names;
      for (const std::size_t gpu : gpus) names += fmt::format("{}{}", names.empty() ? "" : ", ", map_.gpus[gpu].text());
      map_.warnings.push_back(fmt::format("{} carries the traffic of {} GPUs, each gets a share of its bandwidth: {}",
                                          port_name(map_.nics[key.first], key.second), gpus.size(), names));
    }
  }

  void warn_of_distance() {
    for (std::size_t gpu = 0; gpu < map_.rows.size(); ++gpu) {
      const NicMapRow& row = map_.rows[gpu];
      if (!row.port || row.distance.proximity == Proximity::unknown) continue;
      const std::string pair =
          fmt::format("{} and {} are {} apart ({})", map_.gpus[gpu].text(), map_.nics[row.port->nic].name,
                      topology::short_name(row.distance.proximity), topology::explanation(row.distance.proximity));
      if (settings_.gpu_direct_limit && row.distance.proximity > *settings_.gpu_direct_limit) {
        map_.warnings.push_back(
            fmt::format("{}, farther than NCCL_NET_GDR_LEVEL={} allows NCCL; here the NIC reads and "
                        "writes GPU memory at any distance",
                        pair, topology::short_name(*settings_.gpu_direct_limit)));
      } else if (row.distance.proximity == Proximity::system) {
        map_.warnings.push_back(fmt::format("{}: expect a fraction of the NIC's bandwidth", pair));
      }
    }
  }

  const RdmaSettings& settings_;
  NicMap map_;
  std::vector<UsablePort> candidates_;
  std::map<std::size_t, std::string> reasons_;  // why a NIC is not a candidate
};

}  // namespace

std::string NicMap::line(std::size_t gpu) const {
  const NicMapRow& row = rows.at(gpu);
  if (!row.port) return fmt::format("{} -> no NIC: {}", gpus[gpu].text(), row.problem);
  const Nic& nic = nics[row.port->nic];
  const GidEntry& gid = row.port->gid;
  return fmt::format("{} -> {}, {} Gb/s, GID {} ({}, {}{}{}), {}", gpus[gpu].text(), port_name(nic, row.port->port),
                     nic.port(row.port->port)->rate_gbps, gid.index, name_of(gid.type), gid.address(),
                     gid.netdev.empty() ? "" : ", ", gid.netdev, topology::short_name(row.distance.proximity));
}

NicMap map_gpus_to_nics(std::vector<Gpu> gpus, std::vector<Nic> nics, const RdmaSettings& settings) {
  return Mapper(std::move(gpus), std::move(nics), settings).run();
}

std::vector<Gpu> ranks_without_gpu(int ranks) {
  std::vector<Gpu> result(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) result[static_cast<std::size_t>(rank)].cuda_id = rank;
  return result;
}

}  // namespace deep_ep::rdma
