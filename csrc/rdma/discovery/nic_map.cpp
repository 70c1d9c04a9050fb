#include "csrc/rdma/discovery/nic_map.hpp"

#include <strings.h>

#include <algorithm>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {
namespace {

using topology::Distance;
using topology::Gpu;
using topology::Proximity;

std::string port_name(const NicAssignment& one) { return fmt::format("{} port {}", one.nic.name, one.port.number); }

[[noreturn]] void refuse(const std::string& why) {
  fail<SystemError>("RDMA was asked for, but {}. `deep_ep doctor` says more", why);
}

constexpr const char* kNotNamed = "DEEP_EP_DEVICE_TO_HCA_MAPPING does not name it";

class Mapper {
 public:
  Mapper(std::vector<Gpu> gpus, std::vector<Nic> nics, const RdmaSettings& settings) : settings_(settings) {
    for (Gpu& gpu : gpus) map_.rows.push_back({.gpu = std::move(gpu)});
    map_.nics = std::move(nics);
    map_.warnings = settings.warnings;
  }

  NicMap run() {
    if (settings_.mapping.empty()) {
      find_candidates();
      assign();
    } else {
      apply_mapping();
    }
    tell();
    return std::move(map_);
  }

 private:
  // Why this port cannot be used at all; otherwise empty, and it is added to `usable`.
  std::string check_port(const Nic& nic, const NicPort& port, std::vector<NicAssignment>& usable) {
    if (nic.capability == Capability::unsupported) return name_of(nic.capability);
    if (!nic.accessible) {
      return nic.uverbs.empty() ? "it has no device file in /dev/infiniband (is ib_uverbs loaded?)"
                                : fmt::format("/dev/infiniband/{} cannot be opened", nic.uverbs);
    }
    if (!port.active()) {
      return fmt::format("port {} is {} (link: {})", port.number, port.state.empty() ? "in no known state" : port.state,
                         port.physical_state.empty() ? "not known" : port.physical_state);
    }
    const GidChoice choice = choose_gid(port, settings_.gid_index);
    if (!choice.gid) return fmt::format("port {}: {}", port.number, choice.problem);
    usable.push_back({.nic = nic, .port = port, .gid = *choice.gid});
    if (!choice.problem.empty()) {
      map_.warnings.push_back(fmt::format("{}: {}", port_name(usable.back()), choice.problem));
    }
    return {};
  }

  // --- the operator's mapping ---

  void apply_mapping() {
    for (NicMapRow& row : map_.rows) row.problem = kNotNamed;
    for (const Nic& nic : map_.nics) why_unused_[nic.name] = kNotNamed;
    for (const ListedDevice& entry : settings_.mapping) {
      const auto id = parse_number<int>(entry.gpu);
      const auto is_named = [&](const NicMapRow& row) {
        return id ? row.gpu.cuda_id == id
                  : ::strncasecmp(row.gpu.uuid.c_str(), entry.gpu.c_str(), entry.gpu.size()) == 0;
      };
      if (std::ranges::count_if(map_.rows, is_named) != 1) {
        map_.warnings.push_back(
            fmt::format("DEEP_EP_DEVICE_TO_HCA_MAPPING: '{}' names no GPU of this machine", entry.text));
        continue;
      }
      NicMapRow& row = *std::ranges::find_if(map_.rows, is_named);
      if (!row.problem.empty() && row.problem != kNotNamed) continue;
      row.problem = check_entry(entry, row.nics);
      if (row.problem.empty()) continue;
      row.problem = fmt::format("DEEP_EP_DEVICE_TO_HCA_MAPPING: '{}': {}", entry.text, row.problem);
      row.nics.clear();  // a NIC that is not there is a problem of the whole
    }
  }

  // Why the entry's NIC cannot be used; otherwise empty, and it is added to `usable`.
  std::string check_entry(const ListedDevice& entry, std::vector<NicAssignment>& usable) {
    const auto nic = std::ranges::find(map_.nics, entry.name, &Nic::name);
    if (nic == map_.nics.end()) {
      std::vector<std::string> names;
      for (const Nic& one : map_.nics) names.push_back(one.name);
      if (names.empty()) names = {"none"};
      return fmt::format("there is no HCA '{}'; HCAs of this machine: {}", entry.name, fmt::join(names, ", "));
    }
    const int number = entry.port.value_or(1);
    const auto port = std::ranges::find(nic->ports, number, &NicPort::number);
    if (port == nic->ports.end()) return fmt::format("{} has no port {}", nic->name, number);
    const auto same = [&](const NicAssignment& one) { return one.nic.name == nic->name && one.port.number == number; };
    return std::ranges::any_of(usable, same) ? "the GPU has this NIC already" : check_port(*nic, *port, usable);
  }

  // --- the automatic choice ---

  void find_candidates() {
    for (const Nic& nic : map_.nics) {
      std::string& why_not = why_unused_[nic.name] = "it has no port";
      for (const NicPort& port : nic.ports) {
        why_not = settings_.nics.allows(nic.name, port.number)
                      ? check_port(nic, port, candidates_)
                      : fmt::format("{} does not allow it", settings_.nics.setting());
        if (!why_not.empty()) continue;
        why_not = "all GPUs have a NIC already";
        break;  // one port per NIC: ports of one device share its PCIe link
      }
    }
    if (settings_.nics.is_set()) return;
    double fastest = 0;
    for (const NicAssignment& candidate : candidates_) fastest = std::max(fastest, candidate.port.rate_gbps);
    std::erase_if(candidates_, [&](const NicAssignment& candidate) {
      const double rate = candidate.port.rate_gbps;
      if (rate == 0 || rate * 2 >= fastest) return false;
      why_unused_[candidate.nic.name] = fmt::format(
          "{} Gb/s where others have {} Gb/s: taken for a storage or management NIC; DEEP_EP_HCA_LIST may "
          "name it",
          rate, fastest);
      return true;
    });
  }

  // What decides first comes first: sharing a NIC, distance, a second function of one card (its ports share the card's
  // PCIe link), order. PCI distances are those of a tree, so taking the nearest pair first costs no other pair more.
  void assign() {
    std::vector<std::tuple<Proximity, int, int, std::size_t, std::size_t>> pairs;  // distance, function, GPU, NIC
    std::vector<int> functions;  // of each candidate: how many of the same card come before it
    std::map<topology::PciAddress, int> of_card;
    for (const NicAssignment& candidate : candidates_) {
      auto card = candidate.nic.pci.address;
      if (card) card->function = 0;
      functions.push_back(card ? of_card[*card]++ : 0);
    }
    std::size_t left = 0;
    for (std::size_t gpu = 0; gpu < map_.rows.size(); ++gpu) {
      map_.rows[gpu].problem = candidates_.empty() ? "there is no usable NIC" : "it belongs to another container";
      // GPUs of other containers take part only if there is a NIC for each: a container that was given a few NICs has
      // them for itself.
      if (!map_.rows[gpu].gpu.cuda_id && candidates_.size() < map_.rows.size()) continue;
      ++left;
      for (std::size_t c = 0; c < candidates_.size(); ++c) {
        const Distance away = topology::distance(map_.rows[gpu].gpu.pci, candidates_[c].nic.pci);
        // One that is not known may be the longest.
        pairs.emplace_back(std::min(away.proximity, Proximity::system), away.hops, functions[c], gpu, c);
      }
    }
    std::ranges::sort(pairs);
    // NICs are shared only where all have a GPU, and then by one more each.
    while (left != 0 && !pairs.empty()) {
      std::vector<bool> taken(candidates_.size());
      for (const auto& [proximity, hops, function, gpu, c] : pairs) {
        if (!map_.rows[gpu].nics.empty() || taken[c]) continue;
        map_.rows[gpu].nics = {candidates_[c]};
        taken[c] = true;
        --left;
      }
    }
  }

  // --- what to tell ---

  void tell() {
    std::map<std::string, std::vector<std::string>> users;  // GPUs of each port
    for (NicMapRow& row : map_.rows) {
      if (!row.nics.empty()) row.problem.clear();
      for (NicAssignment& one : row.nics) {
        users[port_name(one)].push_back(row.gpu.text());
        why_unused_.erase(one.nic.name);
        one.distance = topology::distance(row.gpu.pci, one.nic.pci);
        if (one.distance.proximity != Proximity::system) continue;
        map_.warnings.push_back(
            fmt::format("{} and {} are SYS apart (across NUMA nodes): expect a fraction of the NIC's bandwidth",
                        row.gpu.text(), one.nic.name));
      }
    }
    for (const auto& [port, gpus] : users) {
      if (gpus.size() < 2) continue;
      map_.warnings.push_back(fmt::format("{} carries the traffic of {} GPUs, each gets a share of its bandwidth: {}",
                                          port, gpus.size(), fmt::join(gpus, ", ")));
    }
    for (const Nic& nic : map_.nics) {
      const auto why = why_unused_.find(nic.name);
      if (why != why_unused_.end()) map_.unused.push_back(fmt::format("{}: {}", nic.name, why->second));
    }
  }

  const RdmaSettings& settings_;
  NicMap map_;
  std::vector<NicAssignment> candidates_;
  std::map<std::string, std::string> why_unused_;  // of each NIC
};

}  // namespace

std::string NicMapRow::text() const {
  if (nics.empty()) return fmt::format("{} -> no NIC: {}", gpu.text(), problem);
  const NicAssignment& first = nics.front();
  std::string others;
  for (const NicAssignment& one : std::span(nics).subspan(1)) {
    others += fmt::format(", and {}", port_name(one));
  }
  return fmt::format("{} -> {}, {} Gb/s, {}, {}{}", gpu.text(), port_name(first), first.port.rate_gbps,
                     first.gid.text(), topology::short_name(first.distance.proximity), others);
}

NicMap map_gpus_to_nics(std::vector<Gpu> gpus, std::vector<Nic> nics, const RdmaSettings& settings) {
  return Mapper(std::move(gpus), std::move(nics), settings).run();
}

std::vector<Gpu> ranks_without_gpu(int ranks) {
  std::vector<Gpu> result(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) result[static_cast<std::size_t>(rank)].cuda_id = rank;
  return result;
}

std::string why_no_rdma(const NicMap& map) {
  if (map.nics.empty()) {
    return "this machine has no RDMA device (/sys/class/infiniband is empty or missing): load the driver of its NIC, "
           "or give the container its devices";
  }
  if (!std::ranges::all_of(map.rows, [](const NicMapRow& row) { return row.nics.empty(); })) return {};
  return fmt::format("no RDMA device of this machine can be used: {}", fmt::join(map.unused, "; "));
}

const std::vector<NicAssignment>& nics_of(const NicMap& map, std::size_t gpu) {
  const NicMapRow& row = map.rows.at(gpu);
  if (!row.nics.empty()) return row.nics;
  const std::string reason = row.problem.starts_with("DEEP_EP_") ? "" : why_no_rdma(map);
  refuse(reason.empty() ? fmt::format("{} has no NIC: {}", row.gpu.text(), row.problem) : reason);
}

const std::vector<NicAssignment>& nics_of_cuda_device(const NicMap& map, int ordinal) {
  const std::string place = cuda_device_pci_address(ordinal);
  const auto address = topology::parse_pci_address(place);
  const auto row = std::ranges::find(map.rows, address, [](const NicMapRow& one) { return one.gpu.pci.address; });
  if (address && row != map.rows.end()) return nics_of(map, static_cast<std::size_t>(row - map.rows.begin()));
  refuse(map.nics.empty() ? why_no_rdma(map)
                          : fmt::format("CUDA device {} (at '{}') is neither in /proc/driver/nvidia/gpus nor in "
                                        "/sys/bus/pci/devices",
                                        ordinal, place));
}

bool keeps_to_path(const std::vector<NicAssignment>& nics) {
  return nics.size() > 1 || (!nics.empty() && nics[0].nic.pci.address && nics[0].port.ethernet());
}

}  // namespace deep_ep::rdma
