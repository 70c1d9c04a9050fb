// `deep_ep doctor`: machines of Google Kubernetes Engine: NCCL's plugin gIB, and the pod's RDMA networks.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/pod_info.hpp"

namespace deep_ep::tools {
namespace {

constexpr const char* kGib = "/usr/local/gib";
constexpr const char* kInterfaces = "networking.gke.io/interfaces";

bool is_google(const Patient& patient) {
  return patient.root.read("/sys/class/dmi/id/product_name").value_or("").starts_with("Google");
}

// "libnccl.so.2.27.5" tells what NCCL it is.
std::string nccl_of_gib(const Patient& patient) {
  const auto file = patient.root.resolve(fmt::format("{}/lib64/libnccl.so.2", kGib));
  const std::size_t at = file ? file->rfind(".so.") : std::string::npos;
  return at == std::string::npos ? "" : file->substr(at + 4);
}

bool has_net_plugin(const Patient& patient) {
  const auto names = patient.root.list(fmt::format("{}/lib64", kGib));
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name.starts_with("libnccl-net") && name.find(".so") != std::string::npos;
  });
}

bool is_searched(const Patient& patient, std::string_view folder) {
  const std::string path = patient.environment("LD_LIBRARY_PATH").value_or("");
  for (const std::string_view entry : split(path, ':')) {
    if (entry == folder) return true;
  }
  return false;
}

void check_gib(const Patient& patient, Findings& findings) {
  const bool asked_for = patient.environment("NCCL_NET") == "gIB";
  const bool installed = patient.root.exists(kGib);
  if (!installed) {
    if (asked_for) {
      findings.push_back({"gib", Verdict::error, fmt::format("NCCL_NET=gIB, but there is no {}", kGib),
                          "NCCL does not start: \"Failed to initialize any NET plugin\". This library does not need it",
                          "mount /home/kubernetes/bin/gib of the node at /usr/local/gib, or unset NCCL_NET"});
    }
    return;
  }
  const std::string nccl = nccl_of_gib(patient);
  findings.push_back({"gib", Verdict::ok, fmt::format("gIB is there{}{}", nccl.empty() ? "" : ", with NCCL ", nccl),
                      "for NCCL's traffic only; this library uses the NICs by itself", ""});
  if (asked_for && !has_net_plugin(patient)) {
    findings.push_back({"gib", Verdict::error, fmt::format("NCCL_NET=gIB, but {}/lib64 has no libnccl-net*.so", kGib),
                        "NCCL does not start: \"Failed to initialize any NET plugin\"",
                        "let the node's installer finish"});
  } else if (asked_for && !is_searched(patient, fmt::format("{}/lib64", kGib))) {
    findings.push_back({"gib", Verdict::warning, fmt::format("NCCL_NET=gIB, but LD_LIBRARY_PATH lacks {}/lib64", kGib),
                        "NCCL may not find the plugin, or find another NCCL",
                        fmt::format("source {}/scripts/set_nccl_env.sh", kGib)});
  }
  for (const char* name : {"NCCL_TUNER_CONFIG_PATH", "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE"}) {
    const auto file = patient.environment(name);
    if (!file || patient.root.exists(*file)) continue;
    findings.push_back({"gib", Verdict::warning, fmt::format("{}={}: there is no such file", name, *file),
                        "gIB refuses to start, or NCCL is not tuned for this machine",
                        fmt::format("source {}/scripts/set_nccl_env.sh", kGib)});
  }
}

// Interfaces of RDMA networks that the pod's annotation asks for.
std::vector<std::string> interfaces_asked_for(const std::string& annotation) {
  std::vector<std::string> names;
  const auto list = nlohmann::json::parse(annotation, nullptr, false);
  if (!list.is_array()) return names;
  for (const auto& entry : list) {
    if (!entry.is_object()) continue;
    const auto name = entry.find("interfaceName");
    if (name != entry.end() && name->is_string()) names.push_back(name->get<std::string>());
  }
  return names;
}

/// Interfaces that RDMA devices belong to and that have no address their GIDs could come from.
std::vector<std::string> without_address(const Patient& patient, const std::vector<std::string>& names) {
  std::vector<std::string> result;
  for (const std::string& name : names) {
    const std::vector<std::string> devices =
        patient.root.list(fmt::format("/sys/class/net/{}/device/infiniband", name));
    const bool has_one = std::any_of(devices.begin(), devices.end(), [&](const std::string& device) {
      const auto nic =
          std::find_if(patient.nics.begin(), patient.nics.end(), [&](const auto& one) { return one.name == device; });
      if (nic == patient.nics.end()) return false;
      return std::any_of(nic->ports.begin(), nic->ports.end(), [&](const rdma::NicPort& port) {
        return rdma::choose_gid(port.gids, port.ethernet(), {}).gid.has_value();
      });
    });
    if (!devices.empty() && !has_one) result.push_back(name);
  }
  return result;
}

void check_networks(const Patient& patient, Findings& findings) {
  const auto annotations = read_pod_info(patient.root, "annotations");
  const auto found = annotations.find(kInterfaces);
  if (found == annotations.end()) return;
  const std::vector<std::string> names = interfaces_asked_for(found->second);
  if (names.empty()) {
    findings.push_back({"pod_networks", Verdict::warning,
                        fmt::format("the annotation {} names no interface", kInterfaces),
                        "the pod gets its first network alone", "a JSON list of interfaceName and network"});
    return;
  }
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    if (!patient.root.exists("/sys/class/net/" + name)) missing.push_back(name);
  }
  const std::vector<std::string> bare = without_address(patient, names);
  if (missing.empty() && !bare.empty()) {
    findings.push_back(
        {"pod_networks", Verdict::error,
         fmt::format("interfaces of the annotation {} that have no address: {}", kInterfaces, fmt::join(bare, ", ")),
         "the pod got the device of the network, networking.gke.io.networks/rdma-N, but none of its addresses, "
         "networking.gke.io.networks/rdma-N.IP: its NIC has no GID that peers could answer to",
         "does the node still have addresses of that network? deep_ep doctor --cluster; the range of the subnet of "
         "rdma-N must hold all pods"});
    return;
  }
  if (missing.empty()) {
    findings.push_back({"pod_networks", Verdict::ok,
                        fmt::format("the pod has the {} interfaces of its annotation", names.size()), "", ""});
    return;
  }
  findings.push_back(
      {"pod_networks", Verdict::error,
       fmt::format("the annotation {} asks for interfaces that are not there: {}", kInterfaces,
                   fmt::join(missing, ", ")),
       "NICs of these networks have no address in this pod; with hostNetwork the annotation has no effect",
       "either hostNetwork: true without the annotation, or the annotation and the Network objects rdma-0 to "
       "rdma-7 (deep_ep doctor --cluster)"});
}

}  // namespace

void check_gke(const Patient& patient, Findings& findings) {
  check_gib(patient, findings);
  check_networks(patient, findings);
  if (is_google(patient) && !patient.nics.empty()) {
    findings.push_back(
        {"google", Verdict::ok, "this is a machine of Google Compute Engine, with RDMA devices", "", ""});
  }
}

// The labels by which Kueue and schedulers know how near nodes are to each other.
void check_node_labels(const Patient& patient, Findings& findings) {
  auto labels = read_pod_info(patient.root, "labels");
  labels.merge(read_pod_info(patient.root, "annotations"));
  std::string text;
  for (const auto& [name, value] : labels) {
    if (name.find("topology") == std::string::npos && name.find("physical_host") == std::string::npos) continue;
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", name, value);
  }
  if (text.empty()) return;
  findings.push_back({"topology", Verdict::ok, text,
                      "jobs should get nodes with equal blocks, for the shortest ways between them", ""});
}

}  // namespace deep_ep::tools
