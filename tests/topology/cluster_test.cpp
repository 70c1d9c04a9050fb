// `deep_ep doctor --cluster`, with shell scripts in the place of kubectl.
#include "tools/doctor/cluster/cluster.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "tests/topology/fake_machine.hpp"

namespace deep_ep::tools {
namespace {

std::string node(const std::string& name, const std::string& gpus, const std::string& ready,
                 const std::string& verdict) {
  return fmt::format(
      R"({{"metadata":{{"name":"{}","labels":{{"cloud.google.com/gke-accelerator":"nvidia-b200","cloud.google.com/gce-topology-block":"b1"}},)"
      R"("annotations":{{"deep-ep/verdict":"{}"}}}},"status":{{"allocatable":{{"nvidia.com/gpu":"{}"}},)"
      R"("conditions":[{{"type":"Ready","status":"{}"}}]}}}})",
      name, verdict, gpus, ready);
}

std::string networks(int count, int not_ready = -1) {
  std::string items;
  for (int i = 0; i < count; ++i) {
    items += fmt::format(
        R"({}{{"metadata":{{"name":"rdma-{}"}},"status":{{"conditions":[{{"type":"Ready","status":"{}"}}]}}}})",
        i == 0 ? "" : ",", i, i == not_ready ? "False" : "True");
  }
  return items;
}

class DoctorCluster : public testing::Test {
 protected:
  void kubectl(const std::string& script) const {
    machine_.write("/bin/kubectl", "#!/bin/sh\n" + script);
    std::filesystem::permissions(machine_.path() / "bin/kubectl", std::filesystem::perms::owner_all);
  }
  /// Answers with these items: nodes, both kinds of networks, names of definitions.
  void cluster(const std::string& nodes, const std::string& rdma, const std::string& definitions) const {
    machine_.write("/nodes", "{\"items\":[" + nodes + "]}");
    machine_.write("/networks", "{\"items\":[" + rdma + "]}");
    machine_.write("/definitions", "{\"items\":[" + definitions + "]}");
    const std::string root = machine_.path().string();
    kubectl(fmt::format("case $2 in nodes) cat {0}/nodes;; custom*) cat {0}/definitions;; *) cat {0}/networks;; esac",
                        root));
  }
  std::string found(double seconds = 60) const {
    std::string text;
    for (const Finding& finding : check_cluster({(machine_.path() / "bin").string() + ":/no/such/folder", seconds})) {
      if (finding.check != "kubectl" && finding.check != "gcloud")
        text += fmt::format("{}: {}\n", name_of(finding.verdict), finding.found);
    }
    return text;
  }
  test::FakeMachine machine_;
};

TEST_F(DoctorCluster, HasAllThatIsNeeded) {
  cluster(node("a", "8", "True", "usable") + "," + node("b", "8", "True", ""), networks(8),
          R"({"metadata":{"name":"jobsets.jobset.x-k8s.io"}},{"metadata":{"name":"clusterqueues.kueue.x-k8s.io"}},)"
          R"({"metadata":{"name":"topologies.kueue.x-k8s.io"}})");
  EXPECT_EQ(found(),
            "ok: 2 nodes of 8 x nvidia-b200\nok: Network rdma-0 to rdma-7 are Ready\n"
            "ok: GKENetworkParamSet rdma-0 to rdma-7 are Ready\nok: JobSet is installed\nok: Kueue is installed\n"
            "ok: Topology-aware scheduling of Kueue is installed\n");
}

TEST_F(DoctorCluster, SaysWhatIsMissing) {
  cluster(node("a", "0", "True", "") + "," + node("b", "8", "False", "not usable: D4 mlx5_1 port 1 is DOWN"),
          networks(7, 2), "");
  EXPECT_EQ(found(),
            "error: node a has nvidia-b200 but offers no nvidia.com/gpu\nerror: node b is not Ready\n"
            "error: node b: deep_ep says not usable: D4 mlx5_1 port 1 is DOWN\n"
            "ok: 1 nodes of 0 x nvidia-b200, 1 nodes of 8 x nvidia-b200\n"
            "error: Network missing: rdma-7; not Ready: rdma-2\n"
            "error: GKENetworkParamSet missing: rdma-7; not Ready: rdma-2\n"
            "note: JobSet is not installed\nnote: Kueue is not installed\n"
            "note: Topology-aware scheduling of Kueue is not installed\n");
  cluster(R"({"metadata":{"name":"cpu"}})", "", "");
  EXPECT_NE(found().find("error: none of 1 nodes has GPUs\n"), std::string::npos);
}

TEST_F(DoctorCluster, DevicesAndAddressesOfNetworks) {
  const auto with = [](const std::string& name, const std::string& without) {
    std::string allocatable = "\"nvidia.com/gpu\":\"8\"";
    for (int i = 0; i < 8; ++i) {
      for (const char* kind : {"", ".IP"}) {
        const std::string one = fmt::format("rdma-{}{}", i, kind);
        allocatable += fmt::format(",\"networking.gke.io.networks/{}\":\"{}\"", one, one == without ? "0" : "1");
      }
    }
    return fmt::format(
        R"({{"metadata":{{"name":"{}"}},"status":{{"allocatable":{{{}}},"conditions":[{{"type":"Ready","status":"True"}}]}}}})",
        name, allocatable);
  };
  cluster(with("a", "") + "," + with("b", "rdma-3.IP"), networks(8), "");
  const std::string text = found();
  EXPECT_NE(text.find("error: node b does not offer networking.gke.io.networks/ rdma-3.IP\n"), std::string::npos)
      << text;
  EXPECT_NE(text.find("ok: 1 nodes offer devices and addresses of all 8 RDMA networks\n"), std::string::npos) << text;
}

TEST_F(DoctorCluster, OtherClustersHaveNoSuchNetworks) {
  machine_.write("/nodes", "{\"items\":[" + node("a", "8", "True", "") + "]}");
  kubectl(
      fmt::format("case $2 in nodes) cat {}/nodes;; *networking*) echo \"error: the server doesn't have a resource "
                  "type\" >&2; exit 1;; "
                  "*) echo '{{\"items\":[]}}';; esac",
                  machine_.path().string()));
  EXPECT_NE(found().find("note: the cluster has no objects of kind Network\n"), std::string::npos) << found();
}

TEST_F(DoctorCluster, AFailingKubectlIsQuoted) {
  kubectl("echo 'Unable to connect to the server: refused' >&2; exit 1");
  EXPECT_EQ(found(), "error: kubectl get nodes ended with status 1: Unable to connect to the server: refused\n");
  kubectl("echo no json");
  EXPECT_EQ(found(), "error: kubectl get nodes: the answer is no list of objects\n");
  kubectl(R"(echo '{"items":[1,null,{"metadata":7},{"status":{"conditions":[3],"allocatable":[]}}]}')");
  EXPECT_TRUE(found().starts_with("error: none of 4 nodes has GPUs\n")) << found();
}

TEST_F(DoctorCluster, AHangingKubectlIsEnded) {
  kubectl("sleep 1000 & echo $! > " + machine_.path().string() + "/pid; wait");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(found(2), "error: kubectl get nodes: no answer within 2 s\n");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST_F(DoctorCluster, WithoutKubectl) {
  const Findings findings = check_cluster({"/no/such/folder", 1});
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].found, "kubectl is not on PATH");
}

}  // namespace
}  // namespace deep_ep::tools
