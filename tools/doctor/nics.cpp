// `deep_ep doctor`: RDMA devices, ports and GIDs.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

using rdma::Capability;
using rdma::Nic;
using rdma::NicPort;

void check_device_file(const Patient& patient, const Nic& nic, Findings& findings) {
  if (nic.accessible) return;
  const std::string file = "/dev/infiniband/" + nic.uverbs;
  if (nic.uverbs.empty()) {
    findings.push_back({"device_file", Verdict::error, fmt::format("{} has no uverbs device", nic.name),
                        "no program can use it through verbs", "load the kernel module ib_uverbs"});
  } else {
    findings.push_back({"device_file", Verdict::error,
                        fmt::format("{}: {} {}", nic.name, file,
                                    patient.root.exists(file) ? "may not be opened by this user" : "is missing"),
                        "this process cannot use the NIC",
                        "give the container /dev/infiniband (read and write), or the user the group that owns it"});
  }
  findings.back().rdma_only = true;
}

// CUDA opens these if the driver runs GPUs for this container.
void check_gpu_device_files(const Patient& patient, Findings& findings) {
  const bool any = std::ranges::any_of(patient.gpus, [](const auto& gpu) { return gpu.cuda_id.has_value(); });
  if (!any || !patient.root.exists("/dev")) return;
  for (const char* file : {"/dev/nvidiactl", "/dev/nvidia-uvm"}) {
    if (patient.root.writable(file)) continue;
    findings.push_back(
        {"device_file", Verdict::error,
         fmt::format("{} {}", file, patient.root.exists(file) ? "may not be opened by this user" : "is missing"),
         "CUDA does not start in this process",
         "let the container runtime add the GPUs (resources.limits nvidia.com/gpu, --gpus all); on a "
         "host, nvidia-modprobe -u -c 0"});
  }
}

void check_port_gids(const Nic& nic, const NicPort& port, const rdma::GidChoice& choice, Findings& findings) {
  const std::string name = fmt::format("{} port {}", nic.name, port.number);
  if (choice.gid) {
    if (!choice.problem.empty()) {
      findings.push_back({"gid", Verdict::warning, fmt::format("{}: {}", name, choice.problem),
                          "peers may not be reached, or not as intended",
                          "leave the GID index to the library, or correct the variable"});
    }
    return;
  }
  const bool zero = port.gids.empty();
  findings.push_back(
      {"gid", Verdict::error, fmt::format("{}: {}", name, choice.problem),
       zero ? "the port has no address: its network interface has none, or is in another network namespace"
            : "there is no address that peers in other networks could answer to",
       port.ethernet() ? "give the port's network interface an IPv4 address; in Kubernetes, put the interface into the "
                         "pod's network "
                         "namespace (or use hostNetwork)"
                       : "start a subnet manager on this fabric"});
}

// RoCE's packets have 4096 bytes of data at most, and some 60 of headers.
constexpr int kRoceMtu = 4200;

void check_mtu(const Patient& patient, const Nic& nic, const NicPort& port, Findings& findings) {
  if (!port.ethernet() || port.gids.empty() || port.gids.front().netdev.empty()) return;
  const std::string& netdev = port.gids.front().netdev;
  const auto mtu = parse_number<int>(patient.root.text(fmt::format("/sys/class/net/{}/mtu", netdev)));
  if (!mtu || *mtu >= kRoceMtu) return;
  findings.push_back({"mtu", Verdict::warning,
                      fmt::format("{} port {}: the MTU of {} is {}", nic.name, port.number, netdev, *mtu),
                      "RDMA packets are a quarter as long as they could be, which costs some of the bandwidth",
                      fmt::format("ip link set {} mtu 9000, if all switches and peers have it", netdev)});
}

void check_firmware(const Patient& patient, Findings& findings) {
  std::set<std::string> versions;
  for (const Nic& nic : patient.nics) {
    if (nic.capability == Capability::mlx5 && !nic.firmware.empty()) versions.insert(nic.firmware);
  }
  if (versions.size() < 2) return;
  findings.push_back({"firmware", Verdict::note,
                      fmt::format("NICs differ in their firmware: {}", fmt::join(versions, ", ")),
                      "if one NIC is slower than the others, this may be why"});
}

void check_port(const Patient& patient, const Nic& nic, const NicPort& port, Findings& findings) {
  if (port.active()) return check_mtu(patient, nic, port, findings);
  const bool switched_off = port.physical_state == "Disabled";
  findings.push_back(
      {"port", Verdict::error,
       fmt::format("{} port {} is {} (link: {})", nic.name, port.number, port.state, port.physical_state),
       "nothing can be sent or received there; its GPU shares another NIC",
       switched_off ? "switch the network interface on (ip link set dev ... up)"
                    : "check cable and switch, then `ip link`"});
}

}  // namespace

void check_nics(const Patient& patient, Findings& findings) {
  if (patient.nics.empty()) {
    findings.push_back({"nic", Verdict::warning, "there is no RDMA device",
                        "ranks of one machine can talk, ranks of several cannot",
                        "load the NIC's driver (mlx5_ib for ConnectX); give the container its devices; on one machine "
                        "alone, nothing"});
    return;
  }
  std::size_t for_gpus = 0;
  std::size_t unsupported = 0;
  for (const Nic& nic : patient.nics) {
    if (nic.capability == Capability::unsupported) {
      ++unsupported;
      findings.push_back({"nic", Verdict::note,
                          fmt::format("{} ({}, {}): {}", nic.name, nic.driver.empty() ? "unknown driver" : nic.driver,
                                      nic.node_type, name_of(nic.capability)),
                          "the library does not use it"});
      continue;
    }
    for_gpus += nic.capability == Capability::mlx5 ? 1 : 0;
    for (const NicPort& port : nic.ports) check_port(patient, nic, port, findings);
  }
  check_firmware(patient, findings);
  const std::size_t supported = patient.nics.size() - unsupported;
  if (supported == 0) {
    findings.push_back({"nic", Verdict::error, "no RDMA device here has reliable connections over InfiniBand or RoCE",
                        "ranks of several machines cannot talk", "use machines with ConnectX or other RoCE NICs"});
  } else {
    findings.push_back(
        {"nic", Verdict::ok,
         fmt::format("{} RDMA device{}, {} of them mlx5", supported, supported == 1 ? "" : "s", for_gpus),
         for_gpus == supported ? "" : "GPUs can ring the doorbells of mlx5 alone; others need the handler cpu"});
  }
}

void check_gids(const Patient& patient, Findings& findings) {
  const std::size_t before = findings.size();
  std::size_t ports = 0;
  std::set<int> indices;
  for (const Nic& nic : patient.nics) {
    if (nic.capability == Capability::unsupported) continue;
    for (const NicPort& port : nic.ports) {
      if (!port.active()) continue;
      ++ports;
      const rdma::GidChoice choice = rdma::choose_gid(port, patient.settings.gid_index);
      check_port_gids(nic, port, choice, findings);
      if (choice.gid) indices.insert(choice.gid->index);
    }
  }
  if (ports == 0 || findings.size() != before) return;
  findings.push_back({"gid", Verdict::ok,
                      indices.size() == 1
                          ? fmt::format("each of the {} active ports has an address, GID {}", ports, *indices.begin())
                          : fmt::format("each of the {} active ports has an address, under GID indices {}", ports,
                                        fmt::join(indices, ", ")),
                      indices.size() == 1 ? "" : "the library chooses for each port; one index for all would fail"});
}

void check_device_files(const Patient& patient, Findings& findings) {
  const std::size_t before = findings.size();
  std::size_t devices = 0;
  for (const Nic& nic : patient.nics) {
    if (nic.capability == Capability::unsupported) continue;
    ++devices;
    check_device_file(patient, nic, findings);
  }
  check_gpu_device_files(patient, findings);
  if (devices + patient.gpus.size() > 0 && findings.size() == before) {
    findings.push_back({"device_file", Verdict::ok, "the device files of all NICs and GPUs can be opened"});
  }
}

}  // namespace deep_ep::tools
