#include "tools/doctor/machine_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/json_output.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/gpu_models.hpp"
#include "tools/doctor/print.hpp"

namespace deep_ep::tools {
namespace {

/// "8 x NVIDIA B200", or "4 x A, 4 x B".
std::string counted(const std::vector<std::string>& names) {
  std::map<std::string, int> counts;
  for (const std::string& name : names) ++counts[name.empty() ? "not known" : name];
  std::string text;
  for (const auto& [name, count] : counts) text += fmt::format("{}{} x {}", text.empty() ? "" : ", ", count, name);
  return text.empty() ? "none" : text;
}

std::string gpu_memory(const Patient& patient) {
  if (patient.live_gpus && !patient.live_gpus->empty()) {
    std::vector<std::string> sizes;
    for (const LiveGpu& gpu : *patient.live_gpus) sizes.push_back(format_bytes(gpu.memory_bytes));
    return counted(sizes);
  }
  std::vector<std::string> sizes;
  for (const topology::Gpu& gpu : patient.gpus) {
    const GpuModel* model = model_of(gpu.model);
    sizes.push_back(model == nullptr || model->memory_gb == 0 ? "" : fmt::format("{} GB (as sold)", model->memory_gb));
  }
  return counted(sizes);
}

/// What the driver says of NVLink; of a copy of files nothing is known.
void add_nvlink(const Patient& patient, MachineReport& report) {
  if (!patient.live_gpus || patient.live_gpus->empty()) return;
  const std::vector<LiveGpu>& gpus = *patient.live_gpus;
  const NvLinkPairs pairs = count_pairs(gpus);
  if (pairs.known > 0) {
    report.push_back(
        {"nvlink", "NVLink", fmt::format("{} of {} pairs of GPUs", pairs.known - pairs.missing.size(), pairs.known)});
  }
  std::vector<std::string> domains;
  for (const LiveGpu& gpu : gpus) {
    const std::string domain = gpu.fabric ? gpu.fabric->text() : "";
    if (!domain.empty() && std::find(domains.begin(), domains.end(), domain) == domains.end())
      domains.push_back(domain);
  }
  if (!domains.empty())
    report.push_back({"nvlink_domain", "NVLink domain", fmt::format("{}", fmt::join(domains, "; "))});
}

std::string os_of(const Patient& patient) {
  std::istringstream lines(patient.root.read("/etc/os-release").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("PRETTY_NAME=")) continue;
    std::string name = line.substr(line.find('=') + 1);
    std::erase(name, '"');
    return name;
  }
  return "not known";
}

std::string first_copy(const Patient& patient, const std::string& name) {
  const auto copies = find_library(patient, name);
  return copies.empty() ? "none"
                        : fmt::format("{} (private ABI {})", copies.front().file,
                                      copies.front().private_abi.empty() ? "not known" : copies.front().private_abi);
}

std::string or_else(const std::optional<std::string>& text, const char* otherwise) {
  return text && !text->empty() ? *text : otherwise;
}

/// Answers that differ between nodes by their nature, and must: one of them twice is one machine twice.
bool is_identity(std::string_view key) { return key == "boot_id"; }
bool is_name(std::string_view key) { return key == "host"; }
/// A run does not start, or not well, where these differ.
bool must_be_equal(std::string_view key) { return key == "deep_ep" || key == "gpus" || key == "gids"; }

}  // namespace

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
      const rdma::GidChoice choice = rdma::choose_gid(port.gids, port.ethernet(), patient.settings.gid);
      gids.push_back(choice.gid ? fmt::format("{}", name_of(choice.gid->type)) : "no GID");
    }
    firmware.push_back(nic.firmware);
  }
  const auto read = [&](const char* file) { return patient.root.read(file); };
  const auto peermem = read("/sys/module/nvidia_peermem/version");
  MachineReport report = {
      {"deep_ep", "deep_ep", version},
      {"host", "Host", or_else(read("/proc/sys/kernel/hostname"), "not known")},
      {"boot_id", "Boot", or_else(read("/proc/sys/kernel/random/boot_id"), "not known")},
      {"machine", "Machine", or_else(read("/sys/class/dmi/id/product_name"), "not known")},
      {"gpus", "GPUs", counted(gpus)},
      {"gpu_memory", "GPU memory", gpu_memory(patient)},
      {"driver", "NVIDIA driver", or_else(read("/sys/module/nvidia/version"), "none")},
      {"nics", "NICs", counted(nics)},
      {"nic_firmware", "NIC firmware", counted(firmware)},
      {"gids", "GIDs", counted(gids)},
      {"os", "Operating system", os_of(patient)},
      {"kernel", "Kernel", or_else(read("/proc/sys/kernel/osrelease"), "not known")},
      {"rdma_driver", "RDMA driver",
       patient.nics.empty() ? "none" : or_else(read("/sys/module/mlx5_core/version"), "the kernel's own")},
      {"libibverbs", "libibverbs", first_copy(patient, "libibverbs.so.1")},
      {"libmlx5", "libmlx5", first_copy(patient, "libmlx5.so.1")},
      {"peermem", "nvidia-peermem", or_else(peermem, "none")},
  };
  add_nvlink(patient, report);
  return report;
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

NodeReport read_node_report(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw InvalidArgument(fmt::format("--compare {}: cannot read it", file));
  constexpr std::size_t kMost = std::size_t{64} << 20;
  std::string text;
  for (std::istreambuf_iterator<char> at(in), end; at != end && text.size() < kMost; ++at) text += *at;
  auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_object() && json.contains("report")) json = nlohmann::json(json["report"]);
  const bool well =
      json.is_object() && json.contains("deep_ep") &&
      std::all_of(json.begin(), json.end(), [](const nlohmann::json& value) { return value.is_string(); });
  if (!well)
    throw InvalidArgument(
        fmt::format("--compare {}: allowed: what doctor --json or doctor --report --json prints", file));
  return {file, std::move(json)};
}

Findings compare_nodes(const std::vector<NodeReport>& nodes) {
  std::map<std::string, std::map<std::string, std::vector<std::string>>> values;  // key, value, files
  for (const NodeReport& node : nodes) {
    for (const auto& [key, value] : node.report.items()) values[key][value.get<std::string>()].push_back(node.file);
  }
  Findings findings;
  for (const auto& [key, by_value] : values) {
    if (is_identity(key) || is_name(key)) {
      for (const auto& [value, files] : by_value) {
        if (files.size() < 2 || value == "not known") continue;
        findings.push_back({"nodes", is_identity(key) ? Verdict::warning : Verdict::note,
                            fmt::format("{} is {} in {}", key, value, fmt::join(files, ", ")),
                            is_identity(key)
                                ? "this is one machine, examined twice"
                                : "hosts share a name: other libraries take them for one machine; this one goes "
                                  "by the boot id",
                            "", "D22"});
      }
      continue;
    }
    std::size_t files_with = 0;
    std::string text;
    for (const auto& [value, files] : by_value) {
      files_with += files.size();
      text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", value, fmt::join(files, ", "));
    }
    if (by_value.size() == 1 && files_with == nodes.size()) continue;
    findings.push_back({"nodes", must_be_equal(key) ? Verdict::error : Verdict::warning,
                        fmt::format("{} differs: {}", key, text),
                        must_be_equal(key) ? "ranks of these nodes cannot run together, or are refused when they meet"
                        : key == "nvlink_domain" ? "ranks of these nodes reach each other by NICs, not by NVLink"
                                                 : "works, but one node may behave otherwise than the rest",
                        key == "nvlink_domain" ? "nodes of one NVLink partition, if the run counts on it"
                                               : "the same image, driver and firmware on all nodes",
                        "D22"});
  }
  if (findings.empty()) {
    findings.push_back({"nodes", Verdict::ok, fmt::format("{} nodes are equal", nodes.size()), "", "", "D22"});
  }
  return findings;
}

int run_compare(const std::vector<std::string>& files, bool json) {
  if (files.size() < 2) throw InvalidArgument("--compare: allowed: two files or more");
  std::vector<NodeReport> nodes;
  for (const std::string& file : files) nodes.push_back(read_node_report(file));
  const Findings findings = compare_nodes(nodes);
  if (json) {
    print_json({{"findings", findings_json(findings)}, {"equal", worst_of(findings) <= Verdict::note}});
  } else {
    fmt::print("{}", printable(to_text(findings)));
  }
  return worst_of(findings) < Verdict::error ? 0 : 1;
}

}  // namespace deep_ep::tools
