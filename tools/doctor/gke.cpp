// `deep_ep doctor`: machines of Google Kubernetes Engine: NCCL's plugin gIB, and the pod's RDMA networks.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr const char* kGib = "/usr/local/gib";
constexpr const char* kInterfaces = "networking.gke.io/interfaces";

/// The value of `name` in /etc/podinfo/annotations, the downward API's file, which has it as a string of Go's.
std::string annotation_of(const Patient& patient, std::string_view name) {
  std::string text = rest_of_line(patient.root.text("/etc/podinfo/annotations"), fmt::format("{}=", name));
  const auto value = nlohmann::json::parse(text, nullptr, false);
  return value.is_string() ? value.get<std::string>() : text;
}

bool has_net_plugin(const Patient& patient) {
  return std::ranges::any_of(patient.root.list(fmt::format("{}/lib64", kGib)), [](const std::string& name) {
    return name.starts_with("libnccl-net") && name.find(".so") != std::string::npos;
  });
}

bool is_searched(const Patient& patient, std::string_view folder) {
  const std::string path = patient.environment("LD_LIBRARY_PATH").value_or("");
  return std::ranges::count(split(path, ':'), folder) != 0;
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
  findings.push_back(
      {"gib", Verdict::ok, "gIB is there", "for NCCL's traffic only; this library uses the NICs by itself"});
  if (asked_for && !has_net_plugin(patient)) {
    findings.push_back({"gib", Verdict::error, fmt::format("NCCL_NET=gIB, but {}/lib64 has no libnccl-net*.so", kGib),
                        "NCCL does not start: \"Failed to initialize any NET plugin\"",
                        "let the node's installer finish"});
  } else if (asked_for && !is_searched(patient, fmt::format("{}/lib64", kGib))) {
    findings.push_back({"gib", Verdict::warning, fmt::format("NCCL_NET=gIB, but LD_LIBRARY_PATH lacks {}/lib64", kGib),
                        "NCCL may not find the plugin, or find another NCCL",
                        fmt::format("source {}/scripts/set_nccl_env.sh", kGib)});
  }
}

// Interfaces of RDMA networks that the pod's annotation asks for.
std::vector<std::string> interfaces_asked_for(const std::string& annotation) {
  std::vector<std::string> names;
  const auto list = nlohmann::json::parse(annotation, nullptr, false);
  if (!list.is_array()) return names;
  for (const auto& entry : list) {
    const auto name = entry.is_object() ? entry.value("interfaceName", nlohmann::json()) : nlohmann::json();
    if (name.is_string()) names.push_back(name.get<std::string>());
  }
  return names;
}

void check_networks(const Patient& patient, Findings& findings) {
  const std::string annotation = annotation_of(patient, kInterfaces);
  if (annotation.empty()) return;
  const std::vector<std::string> names = interfaces_asked_for(annotation);
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
  if (missing.empty()) {
    findings.push_back(
        {"pod_networks", Verdict::ok, fmt::format("the pod has the {} interfaces of its annotation", names.size())});
    return;
  }
  findings.push_back(
      {"pod_networks", Verdict::error,
       fmt::format("the annotation {} asks for interfaces that are not there: {}", kInterfaces,
                   fmt::join(missing, ", ")),
       "NICs of these networks have no address in this pod; with hostNetwork the annotation has no effect",
       "either hostNetwork: true without the annotation, or the annotation and the Network objects rdma-0 to "
       "rdma-7 (kubectl get networks)"});
}

}  // namespace

void check_gke(const Patient& patient, Findings& findings) {
  check_gib(patient, findings);
  check_networks(patient, findings);
}

}  // namespace deep_ep::tools
