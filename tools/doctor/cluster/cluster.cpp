#include "tools/doctor/cluster/cluster.hpp"

#include <map>
#include <set>
#include <vector>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/child.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

using nlohmann::json;

constexpr int kRdmaNetworks = 8;
constexpr const char* kAccelerator = "cloud.google.com/gke-accelerator";
constexpr const char* kVerdict = "deep-ep/verdict";  // of deploy/k8s/base/installer-daemonset.yaml

/// A text below an object, whatever is missing on the way; empty then.
std::string text_at(const json& object, std::initializer_list<const char*> way) {
  const json* at = &object;
  for (const char* key : way) {
    if (!at->is_object() || !at->contains(key)) return {};
    at = &(*at)[key];
  }
  return at->is_string() ? at->get<std::string>() : at->is_number_integer() ? std::to_string(at->get<long>()) : "";
}

std::string name_of(const json& object) { return text_at(object, {"metadata", "name"}); }

bool is_ready(const json& object) {
  if (!object.is_object() || !object.contains("status") || !object["status"].is_object()) return false;
  const json conditions = object["status"].value("conditions", json::array());
  for (const json& condition : conditions) {
    if (text_at(condition, {"type"}) == "Ready") return text_at(condition, {"status"}) == "True";
  }
  return false;
}

/// The cluster has no such kind of object.
struct UnknownKind : Error {
  using Error::Error;
};

/// `kubectl get KIND -o json`, within a bounded time: the objects. @throws Error that says why there is no answer.
json ask_cluster(const std::string& kubectl, const char* kind, double seconds) {
  constexpr std::size_t kMostOutput = std::size_t{64} << 20;
  const ChildResult output =
      run_children({{.words = {kubectl, "get", kind, "-o", "json"}}}, seconds, kMostOutput).front();
  const auto refuse = [&](const std::string& why) { fail<Error>("kubectl get {}{}", kind, why); };
  if (output.timed_out) refuse(fmt::format(": no answer within {} s", seconds));
  if (output.too_long) refuse(": the answer is longer than 64 MiB");
  if (output.errors.find("doesn't have a resource type") != std::string::npos) throw UnknownKind(kind);
  if (output.status != 0) {
    const std::string_view first_line = std::string_view(output.errors).substr(0, output.errors.find('\n'));
    refuse(fmt::format(" ended with status {}: {}", output.status, trim(first_line)));
  }
  json list = json::parse(output.output, nullptr, false);
  if (!list.is_object() || !list.contains("items") || !list["items"].is_array()) {
    refuse(": the answer is no list of objects");
  }
  return std::move(list["items"]);
}

void check_node(const json& node, const std::string& gpus, const std::string& accelerator, Findings& findings) {
  const std::string name = name_of(node);
  if (!is_ready(node)) {
    findings.push_back({"node", Verdict::error, fmt::format("node {} is not Ready", name), "no pod starts there",
                        fmt::format("kubectl describe node {}", name)});
  }
  if (gpus == "0") {
    findings.push_back({"node", Verdict::error,
                        fmt::format("node {} has {} but offers no nvidia.com/gpu", name, accelerator),
                        "the driver or the device plugin does not run there",
                        "gpu-driver-version=default for the node pool, or an installer of the driver"});
  }
  const std::string verdict = text_at(node, {"metadata", "annotations", kVerdict});
  if (!verdict.empty() && !verdict.starts_with("ok") && !verdict.starts_with("usable")) {
    findings.push_back({"node", Verdict::error, fmt::format("node {}: deep_ep says {}", name, verdict),
                        "the doctor found it unusable when the installer started there",
                        "deep_ep doctor there names cause and remedy"});
  }
}

void check_nodes(const json& nodes, Findings& findings) {
  std::set<std::string> blocks;
  std::map<std::string, int> kinds;
  for (const json& node : nodes) {
    const std::string offered = text_at(node, {"status", "allocatable", "nvidia.com/gpu"});
    const std::string gpus = offered.empty() ? "0" : offered;
    const std::string accelerator = text_at(node, {"metadata", "labels", kAccelerator});
    if (gpus == "0" && accelerator.empty()) continue;
    ++kinds[fmt::format("{} x {}", gpus, accelerator.empty() ? "GPUs without a label" : accelerator)];
    check_node(node, gpus, accelerator, findings);
    const std::string block = text_at(node, {"metadata", "labels", "cloud.google.com/gce-topology-block"});
    if (!block.empty()) blocks.insert(block);
  }
  if (kinds.empty()) {
    findings.push_back({"node", Verdict::error, fmt::format("none of {} nodes has GPUs", nodes.size()),
                        "no rank can be placed", "a node pool with GPUs: deploy/gke"});
    return;
  }
  std::string text;
  for (const auto& [kind, count] : kinds)
    text += fmt::format("{}{} nodes of {}", text.empty() ? "" : ", ", count, kind);
  findings.push_back(
      {"node", Verdict::ok, text,
       blocks.empty() ? "" : fmt::format("in {} blocks of the network: {}", blocks.size(), fmt::join(blocks, ", "))});
}

/// GKE gives pods two resources of a node for each network: the device, and an address. Nodes without any of
/// them have no networks for pods, which need hostNetwork then.
void check_network_resources(const json& nodes, Findings& findings) {
  std::size_t whole = 0;
  for (const json& node : nodes) {
    std::vector<std::string> missing;
    bool any = false;
    for (int i = 0; i < kRdmaNetworks; ++i) {
      for (const char* kind : {"", ".IP"}) {
        const std::string name = fmt::format("networking.gke.io.networks/rdma-{}{}", i, kind);
        const std::string count = text_at(node, {"status", "allocatable", name.c_str()});
        const bool there = !count.empty() && count != "0";
        any = any || there;
        if (!there) missing.push_back(fmt::format("rdma-{}{}", i, kind));
      }
    }
    if (!any) continue;
    if (missing.empty()) {
      ++whole;
      continue;
    }
    findings.push_back(
        {"networks", Verdict::error,
         fmt::format("node {} does not offer networking.gke.io.networks/ {}", name_of(node), fmt::join(missing, ", ")),
         "rdma-N is the device of a network, rdma-N.IP its addresses: a pod with the annotation needs both, and stays "
         "Pending or gets an interface without an address",
         "the node pool must be made with all additional node networks and pod networks (deploy/gke); pods that are "
         "gone give addresses back after a while"});
  }
  if (whole > 0) {
    findings.push_back(
        {"networks", Verdict::ok,
         fmt::format("{} nodes offer devices and addresses of all {} RDMA networks", whole, kRdmaNetworks)});
  }
}

// GKE joins a pod to the network of a NIC by two objects of the same name.
void check_networks(const json& objects, const char* kind, Findings& findings) {
  std::map<std::string, bool> ready;
  for (const json& object : objects) ready[name_of(object)] = is_ready(object);
  std::vector<std::string> missing;
  std::vector<std::string> not_ready;
  for (int i = 0; i < kRdmaNetworks; ++i) {
    const std::string name = fmt::format("rdma-{}", i);
    if (!ready.contains(name)) {
      missing.push_back(name);
    } else if (!ready[name]) {
      not_ready.push_back(name);
    }
  }
  if (missing.empty() && not_ready.empty()) {
    findings.push_back(
        {"networks", Verdict::ok, fmt::format("{} rdma-0 to rdma-{} are Ready", kind, kRdmaNetworks - 1)});
    return;
  }
  std::string text;
  if (!missing.empty()) text += fmt::format("missing: {}", fmt::join(missing, ", "));
  if (!not_ready.empty()) text += fmt::format("{}not Ready: {}", text.empty() ? "" : "; ", fmt::join(not_ready, ", "));
  findings.push_back({"networks", missing.size() == kRdmaNetworks ? Verdict::warning : Verdict::error,
                      fmt::format("{} {}", kind, text),
                      "pods that ask for these networks stay Pending; pods with hostNetwork do not need them",
                      "deploy/gke makes them; `kubectl describe` says why one is not Ready"});
}

void check_kinds(const json& definitions, Findings& findings) {
  std::set<std::string> names;
  for (const json& object : definitions) names.insert(name_of(object));
  const auto look = [&](const char* name, const char* product, const char* without) {
    const bool there = names.contains(name);
    findings.push_back({"kinds", there ? Verdict::ok : Verdict::note,
                        fmt::format("{} is {}installed", product, there ? "" : "not "), there ? "" : without});
  };
  look("jobsets.jobset.x-k8s.io", "JobSet", "the chart with JobSet does not work here; the Indexed Job does");
  look("clusterqueues.kueue.x-k8s.io", "Kueue",
       "no queues, and no topology-aware scheduling: nodes may be far from each other");
  look("topologies.kueue.x-k8s.io", "Topology-aware scheduling of Kueue",
       "nodes of a job may be far from each other: a Kueue that has the kind Topology (deploy/kueue/topology.yaml)");
}

}  // namespace

Findings check_cluster(const ClusterOptions& options) {
  Findings findings;
  const std::string kubectl = find_program("kubectl", options.path);
  if (kubectl.empty()) {
    findings.push_back(
        {"kubectl", Verdict::error, "kubectl is not on PATH", "the cluster cannot be asked", "install kubectl"});
    return findings;
  }
  findings.push_back({"kubectl", Verdict::ok, kubectl});
  const std::string gcloud = find_program("gcloud", options.path);
  findings.push_back({"gcloud", gcloud.empty() ? Verdict::note : Verdict::ok,
                      gcloud.empty() ? "gcloud is not on PATH" : gcloud,
                      gcloud.empty() ? "node pools and credentials of GKE are made elsewhere" : ""});
  /// Whether there was an answer.
  const auto ask = [&](const char* kind, const auto& check) {
    try {
      check(ask_cluster(kubectl, kind, options.seconds));
      return true;
    } catch (const UnknownKind&) {
      throw;
    } catch (const Error& error) {
      findings.push_back(
          {"cluster", Verdict::error, error.what(), "what the cluster has is not known",
           "kubectl get nodes must work: gcloud container clusters get-credentials, a kubeconfig, or permissions"});
      return false;
    }
  };
  const bool answers = ask("nodes", [&](const json& nodes) {
    check_nodes(nodes, findings);
    check_network_resources(nodes, findings);
  });
  if (!answers) return findings;  // the others would fail alike
  for (const auto& [kind, name] : {std::pair("networks.networking.gke.io", "Network"),
                                   std::pair("gkenetworkparamsets.networking.gke.io", "GKENetworkParamSet")}) {
    try {
      ask(kind, [&](const json& objects) { check_networks(objects, name, findings); });
    } catch (const UnknownKind&) {
      findings.push_back({"networks", Verdict::note, fmt::format("the cluster has no objects of kind {}", name),
                          "it is not GKE, or not made for several networks: pods need hostNetwork to use RDMA"});
    }
  }
  ask("customresourcedefinitions", [&](const json& definitions) { check_kinds(definitions, findings); });
  return findings;
}

int run_cluster(const ClusterOptions& options, bool json_output) {
  const Findings findings = check_cluster(options);
  const bool healthy = worst_of(findings) < Verdict::error;
  if (json_output) {
    print_json({{"findings", to_json(findings)}, {"healthy", healthy}});
  } else {
    fmt::print("{}", printable(to_text(findings)));
  }
  return healthy ? 0 : 1;
}

}  // namespace deep_ep::tools
