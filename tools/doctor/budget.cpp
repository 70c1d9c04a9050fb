// `deep_ep doctor`: what a run of so many ranks needs of NICs and GPUs, by the numbers of `deep_ep size`.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iomanip>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "csrc/support/format.hpp"
#include "tools/doctor/cgroup.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/gpu_models.hpp"
#include "tools/doctor/needs.hpp"

namespace deep_ep::tools {
namespace {

/// How many GPUs use a NIC.
std::map<std::string, std::size_t> users_of_nics(const Patient& patient) {
  std::map<std::string, std::size_t> users;
  for (const rdma::NicMapRow& row : patient.map.rows) {
    if (row.port) ++users[patient.map.nics[row.port->nic].name];
  }
  return users;
}

/// Doorbell pages lie in the first region of the device: a quarter of it, as the driver hands them out in 4 KiB.
std::optional<std::uint64_t> doorbell_pages(const Patient& patient, const std::string& nic) {
  std::istringstream regions(patient.root.read("/sys/class/infiniband/" + nic + "/device/resource").value_or(""));
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  regions >> std::setbase(0) >> begin >> end;  // "0x..."
  if (!regions || end <= begin) return std::nullopt;
  return (end - begin + 1) / 4096;
}

/// Bytes of a GPU that a buffer may take; nothing where that is not known.
struct GpuMemory {
  std::uint64_t bytes = 0;
  bool is_free = false;  ///< what is free now; otherwise what the model is sold with
};
std::optional<GpuMemory> memory_of_gpus(const Patient& patient) {
  std::optional<GpuMemory> least;
  if (patient.live_gpus) {
    for (const LiveGpu& gpu : *patient.live_gpus) {
      if (gpu.memory_bytes != 0 && (!least || gpu.free_bytes < least->bytes)) least = GpuMemory{gpu.free_bytes, true};
    }
    if (least) return least;
  }
  for (const topology::Gpu& gpu : patient.gpus) {
    const GpuModel* model = model_of(gpu.model);
    if (model == nullptr || model->memory_gb == 0) continue;
    const std::uint64_t bytes = static_cast<std::uint64_t>(model->memory_gb) * 1'000'000'000;
    if (!least || bytes < least->bytes) least = GpuMemory{bytes, false};
  }
  return least;
}

std::optional<std::uint64_t> available_memory(const Patient& patient) {
  std::istringstream lines(patient.root.read("/proc/meminfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("MemAvailable:")) continue;
    std::istringstream value(line.substr(line.find(':') + 1));
    std::uint64_t kib = 0;
    if (value >> kib) return kib << 10;
  }
  return std::nullopt;
}

}  // namespace

void check_queues(const Patient& patient, Findings& findings) {
  const auto users = users_of_nics(patient);
  if (users.empty()) return;
  // Where the device is not asked: what mlx5 devices are made with; virtual functions often have less.
  constexpr std::uint64_t kUsualQueuePairs = 131072;
  constexpr std::uint64_t kUsualOfVirtualFunctions = 16384;
  const Needs needs = needs_of(patient);
  const CgroupLimits groups = read_cgroup(patient.root);
  const std::size_t before = findings.size();
  bool asked = true;
  for (const auto& [name, gpus] : users) {
    const std::uint64_t needed = needs.queue_pairs * gpus;
    const auto nic =
        std::find_if(patient.nics.begin(), patient.nics.end(), [&](const auto& n) { return n.name == name; });
    const bool is_virtual = nic != patient.nics.end() && nic->virtual_function;
    const auto live = patient.live_queue_pairs.find(name);
    const bool known = live != patient.live_queue_pairs.end();
    asked = asked && known;
    const std::uint64_t most = known ? live->second : is_virtual ? kUsualOfVirtualFunctions : kUsualQueuePairs;
    const auto pages = doorbell_pages(patient, name);
    if (needed > most / 2 || (pages && needed > *pages / 2)) {
      findings.push_back({"queue_pairs", known && needed > most ? Verdict::error : Verdict::warning,
                          fmt::format("{}: {} queue pairs for {}; {} {}{}", name, needed, needs.text(),
                                      known ? "the device has" : "such devices usually have", most,
                                      pages ? fmt::format(", and {} doorbell pages", *pages) : ""),
                          "connections may fail with ENOMEM when other programs use the device, too",
                          "fewer queue pairs for each peer, or one GPU for each NIC"});
    }
    const auto group = groups.nics.find(name);
    if (group == groups.nics.end()) continue;
    const std::uint64_t objects = needs.rdma_objects * gpus;
    if (group->second.objects && *group->second.objects < objects) {
      findings.push_back({"queue_pairs", Verdict::error,
                          fmt::format("{}: the control group may make {} RDMA objects, {} need {}", name,
                                      *group->second.objects, needs.text(), objects),
                          "connections fail with EAGAIN", "a higher hca_object in rdma.max of the control group"});
    }
    if (group->second.handles && *group->second.handles < gpus) {
      findings.push_back({"queue_pairs", Verdict::error,
                          fmt::format("{}: the control group may open the device {} times, {} ranks use it", name,
                                      *group->second.handles, gpus),
                          "the device cannot be opened: EAGAIN",
                          "a higher hca_handle in rdma.max of the control group"});
    }
  }
  if (findings.size() == before) {
    findings.push_back({"queue_pairs", Verdict::ok,
                        fmt::format("{} queue pairs for each rank: {}", needs.queue_pairs, needs.text()),
                        asked ? "far below what the NICs say they have" : "far below what such NICs usually have", ""});
  }
}

void check_memory(const Patient& patient, Findings& findings) {
  const Needs needs = needs_of(patient);
  const std::uint64_t needed = needs.buffer_bytes;
  const std::string what = fmt::format("a buffer for all modes takes {} ({})", format_bytes(needed), needs.text());
  const auto gpu = memory_of_gpus(patient);
  if (gpu) {
    const std::string have =
        fmt::format("{} {}", format_bytes(gpu->bytes), gpu->is_free ? "are free now" : "is the GPU's whole memory");
    const bool fits = needed < gpu->bytes;
    const bool small = needed < gpu->bytes / 4;
    findings.push_back(
        {"buffers",
         !fits   ? Verdict::error
         : small ? Verdict::ok
                 : Verdict::note,
         fmt::format("{}; {}", what, have),
         !fits ? "making the buffer fails: \"out of memory\"" : "offsets have 64 bits: there is no limit of 2 GiB",
         fits ? "" : "fewer tokens in a call, or end what holds the memory (nvidia-smi); deep_ep size"});
    return;
  }
  const auto host = available_memory(patient);
  if (!host || !patient.gpus.empty()) return;
  const std::uint64_t all = needed * static_cast<std::uint64_t>(needs.run.ranks_per_node);
  findings.push_back({"buffers", all < *host ? Verdict::ok : Verdict::note,
                      fmt::format("{}; {} for all ranks of the node on the CPU, {} are available", what,
                                  format_bytes(all), format_bytes(*host)),
                      "there is no GPU: heaps lie in the host's memory",
                      all < *host ? "" : "fewer ranks or tokens; deep_ep size"});
}

}  // namespace deep_ep::tools
