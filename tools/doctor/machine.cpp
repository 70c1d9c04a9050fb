#include "tools/doctor/machine.hpp"

#include <fmt/format.h>

#include <map>

#include "csrc/support/text.hpp"
#include "tools/common/version.hpp"

namespace deep_ep::tools {
namespace {

using nlohmann::json;

std::string or_else(const std::string& text, const char* otherwise) { return text.empty() ? otherwise : text; }

std::string numa(const topology::PciLocation& pci) {
  return pci.numa_node < 0 ? "NUMA node not known" : fmt::format("NUMA node {}", pci.numa_node);
}

void add_nic(const Patient& patient, const rdma::Nic& nic, std::string& text) {
  text += fmt::format("  {}{}: {}, firmware {}, {}, {}{}; {}\n", nic.name,
                      nic.pci.address ? fmt::format(" ({})", nic.pci.address->text()) : "",
                      or_else(nic.driver, "unknown driver"), or_else(nic.firmware, "not known"), numa(nic.pci),
                      nic.uverbs.empty() ? "no device file" : "/dev/infiniband/" + nic.uverbs,
                      nic.virtual_function ? ", virtual function" : "", name_of(nic.capability));
  for (const rdma::NicPort& port : nic.ports) {
    text += fmt::format("    port {}: {}, link {}, {} Gb/s, {}\n", port.number, port.state, port.physical_state,
                        port.rate_gbps, port.link_layer);
    const rdma::GidChoice used = rdma::choose_gid(port, patient.settings.gid_index);
    for (const rdma::GidEntry& gid : port.gids) {
      text += fmt::format("      GID {}: {}, {}{}{}{}\n", gid.index, or_else(gid.type, "unknown type"), gid.address(),
                          gid.netdev.empty() ? "" : ", ", gid.netdev,
                          used.gid && used.gid->index == gid.index ? "  <- used" : "");
    }
  }
}

/// "8 x NVIDIA B200", or "4 x A, 4 x B".
std::string counted(const std::vector<std::string>& names) {
  std::map<std::string, int> counts;
  for (const std::string& name : names) ++counts[or_else(name, "not known")];
  std::string text;
  for (const auto& [name, count] : counts) text += fmt::format("{}{} x {}", text.empty() ? "" : ", ", count, name);
  return or_else(text, "none");
}

std::string os_of(const Patient& patient) {
  std::string name = rest_of_line(patient.root.text("/etc/os-release"), "PRETTY_NAME=");
  std::erase(name, '"');
  return name;
}

std::string first_copy(const Patient& patient, const std::string& name) {
  const auto copies = find_library(patient, name);
  return copies.empty() ? "none"
                        : fmt::format("{} (private ABI {})", copies.front().file,
                                      or_else(copies.front().private_abi, "not known"));
}

}  // namespace

std::string machine_text(const Patient& patient) {
  const std::string driver = patient.root.text("/proc/driver/nvidia/version");
  std::string text =
      fmt::format("Kernel {}; driver: {}\n", or_else(patient.root.text("/proc/sys/kernel/osrelease"), "not known"),
                  or_else(driver.substr(0, driver.find('\n')), "none"));
  text += fmt::format("\nGPUs: {}\n", patient.gpus.empty() ? "none" : "");
  for (const topology::Gpu& gpu : patient.gpus) {
    text += fmt::format("  {}: {}, {}, {}\n", gpu.text(), or_else(gpu.model, "model not known"),
                        or_else(gpu.uuid, "UUID not known"), numa(gpu.pci));
  }
  text += fmt::format("\nNICs: {}\n", patient.nics.empty() ? "none" : "");
  for (const rdma::Nic& nic : patient.nics) add_nic(patient, nic, text);
  if (!patient.map.rows.empty()) {
    text += "\nGPU to NIC (PIX same switch, PXB several switches, PHB host bridge, NODE, SYS across NUMA nodes)\n";
    for (const rdma::NicMapRow& row : patient.map.rows) text += fmt::format("  {}\n", row.text());
  }
  if (!patient.map.unused.empty() && !patient.map.rows.empty()) {
    text += "\nNICs that no GPU uses\n";
    for (const std::string& line : patient.map.unused) text += fmt::format("  {}\n", line);
  }
  return text;
}

MachineReport report_machine(const Patient& patient, const std::string& version) {
  std::vector<std::string> gpus;
  for (const topology::Gpu& gpu : patient.gpus) {
    if (gpu.cuda_id) gpus.push_back(gpu.model);
  }
  std::vector<std::string> nics;
  std::vector<std::string> firmware;
  std::vector<std::string> gids;
  for (const rdma::Nic& nic : patient.nics) {
    for (const rdma::NicPort& port : nic.ports) {
      nics.push_back(fmt::format("{} Gb/s {} ({})", port.rate_gbps, port.ethernet() ? "RoCE" : port.link_layer,
                                 nic.driver.empty() ? "unknown driver" : nic.driver));
      const rdma::GidChoice choice = rdma::choose_gid(port, patient.settings.gid_index);
      gids.push_back(choice.gid ? choice.gid->type : "no GID");
    }
    firmware.push_back(nic.firmware);
  }
  const auto read = [&](const char* file) { return patient.root.text(file); };
  return {
      {"deep_ep", "deep_ep", version},
      {"host", "Host", or_else(read("/proc/sys/kernel/hostname"), "not known")},
      {"boot_id", "Boot", or_else(read("/proc/sys/kernel/random/boot_id"), "not known")},
      {"machine", "Machine", or_else(read("/sys/class/dmi/id/product_name"), "not known")},
      {"gpus", "GPUs", counted(gpus)},
      {"driver", "NVIDIA driver", or_else(read("/sys/module/nvidia/version"), "none")},
      {"nics", "NICs", counted(nics)},
      {"nic_firmware", "NIC firmware", counted(firmware)},
      {"gids", "GIDs", counted(gids)},
      {"os", "Operating system", or_else(os_of(patient), "not known")},
      {"kernel", "Kernel", or_else(read("/proc/sys/kernel/osrelease"), "not known")},
      {"rdma_driver", "RDMA driver",
       patient.nics.empty() ? "none" : or_else(read("/sys/module/mlx5_core/version"), "the kernel's own")},
      {"libibverbs", "libibverbs", first_copy(patient, "libibverbs.so.1")},
      {"libmlx5", "libmlx5", first_copy(patient, "libmlx5.so.1")},
      {"peermem", "nvidia-peermem", or_else(read("/sys/module/nvidia_peermem/version"), "none")},
  };
}

std::string to_text(const MachineReport& report) {
  std::string text;
  for (const ReportRow& row : report) text += fmt::format("{:<18}{}\n", row.title, row.value);
  return text;
}

nlohmann::json to_json(const MachineReport& report) {
  nlohmann::json json = nlohmann::json::object();
  for (const ReportRow& row : report) json[row.key] = row.value;
  return json;
}

std::string examination_text(const Patient& patient, const Findings& findings, const std::string& more) {
  return printable(fmt::format("{}\n{}Checks\n{}\nFindings\n{}Verdict: {}\n", machine_text(patient), more,
                               checks_text(findings), to_text(findings), overall_of(patient, findings).text));
}

json examination_json(const Patient& patient, const Findings& findings) {
  const Overall overall = overall_of(patient, findings);
  json all = {{"report", to_json(report_machine(patient, full_version()))}, {"checks", checks_json(findings)}};
  all["findings"] = findings;
  all["healthy"] = worst_of(findings) < Verdict::error;
  all["verdict"] = overall.verdict;
  all["decided_by"] = overall.decided_by;
  return all;
}

}  // namespace deep_ep::tools
