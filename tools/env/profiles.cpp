#include "tools/env/env.hpp"

#include <algorithm>
#include <string>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

// GKE's A4 machines: 8 x B200, 8 x ConnectX-7 with RoCE. What NCCL gets there is what Google's plug-in gIB wants on
// this machine type; the plug-in checks it when it starts.
const Profile kGkeA4{
    .name = "gke-a4",
    .help = "Google's A4 machines: 8 B200, 8 RoCE NICs, NCCL with the plug-in gIB",
    .own = {{"DEEP_EP_RDMA_TRAFFIC_CLASS", "52", "the class that this network carries RDMA in, gIB's NCCL_IB_TC"}},
    .nccl = {{"NCCL_NET", "gIB", "Google's plug-in"},
             {"NCCL_CROSS_NIC", "0", "rails: NIC i talks to NIC i"},
             {"NCCL_NET_GDR_LEVEL", "PIX", "a GPU and its NIC share a PCIe switch"},
             {"NCCL_P2P_NET_CHUNKSIZE", "131072", "gIB's value for A4"},
             {"NCCL_NVLS_CHUNKSIZE", "524288", "gIB's value for A4"},
             {"NCCL_IB_ADAPTIVE_ROUTING", "1", "gIB's value for A4"},
             {"NCCL_IB_QPS_PER_CONNECTION", "4", "several paths through the network"},
             {"NCCL_IB_TC", "52", "traffic class of data"},
             {"NCCL_IB_FIFO_TC", "84", "traffic class of NCCL's control messages"},
             {"NCCL_TUNER_CONFIG_PATH", "/usr/local/gib/configs/tuner_config_a4.txtpb", "gIB's tuner for A4"}},
    .nccl_script = "/usr/local/gib/scripts/set_nccl_env.sh",
    .nccl_folder = "/usr/local/gib/lib64",
    .library_path = "/usr/local/nvidia/lib64"};

// GKE's A3 Ultra machines. The network and the plug-in are those of A4; the plug-in's own script knows this machine's
// values, its traffic class included, which then counts here, too (NCCL_IB_TC).
const Profile kGkeA3Ultra{
    .name = "gke-a3u",
    .help =
        "Google's A3 Ultra machines: 8 H200, 8 RoCE NICs, NCCL with the plug-in gIB, whose script knows their values",
    .own = {{"DEEP_EP_RDMA_WIRE", "verbs", "a run that finds no NIC fails instead of copying within one host"}},
    .nccl = {{"NCCL_NET", "gIB", "Google's plug-in"},
             {"NCCL_CROSS_NIC", "0", "rails: NIC i talks to NIC i"},
             {"NCCL_NET_GDR_LEVEL", "PIX", "a GPU and its NIC share a PCIe switch"}},
    .nccl_script = "/usr/local/gib/scripts/set_nccl_env.sh",
    .nccl_folder = "/usr/local/gib/lib64",
    .library_path = "/usr/local/nvidia/lib64"};

const std::vector<Profile>& all() {
  static const std::vector<Profile> profiles = {kGkeA4, kGkeA3Ultra};
  return profiles;
}

}  // namespace

std::span<const Profile> profiles() { return all(); }

const Profile& profile_of(std::string_view name) {
  const auto found = std::find_if(all().begin(), all().end(), [&](const Profile& p) { return p.name == name; });
  if (found != all().end()) return *found;
  std::string names;
  for (const Profile& profile : all()) names += fmt::format("{}{}", names.empty() ? "" : ", ", profile.name);
  fail<InvalidArgument>("--profile {}: there is no such profile, allowed: {}", name, names);
}

}  // namespace deep_ep::tools
