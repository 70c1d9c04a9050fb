// What `deep_ep doctor` says about healthy machines, and about machines that each lack something.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/support/variables.hpp"
#include "tests/topology/doctor_fixture.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/counters.hpp"
#include "tools/doctor/machine.hpp"

namespace deep_ep::tools {
namespace {

TEST_F(Doctor, TheVerdictNamesTheChecksThatDecideIt) {
  const auto verdict = [&] { return overall_of(patient(), findings()).text; };
  EXPECT_EQ(verdict(), "works with limits: D2 no GPU (kernels run on the CPU), D4 RDMA devices");
  write_healthy_machine(machine_);
  EXPECT_EQ(verdict(), "works");
  variables_["DEEP_EP_TIMEOUT"] = "5";
  EXPECT_EQ(verdict(), "works with limits: D12 Environment variables");
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN");
  EXPECT_EQ(verdict(), "does not work between machines: D4 RDMA devices; works within this machine");
  machine_.remove("/dev/infiniband");
  EXPECT_EQ(
      verdict(),
      "does not work between machines: D4 RDMA devices, D6 GPU to NIC, D10 Device files; works within this machine");
  variables_["DEEP_EP_TIMEOUT_S"] = "soon";
  const Overall overall = overall_of(patient(), findings());
  EXPECT_EQ(overall.text, "does not work: D4 RDMA devices, D6 GPU to NIC, D10 Device files, D12 Environment variables");
  EXPECT_EQ(overall.verdict, "does not work");
  EXPECT_EQ(overall.decided_by, (std::vector<std::string>{"D4", "D6", "D10", "D12"}));
}

TEST_F(Doctor, EverySkippedCheckSaysWhy) {
  const Findings found = findings();
  const std::string text = checks_text(found);
  EXPECT_NE(text.find("  D1   skip  Driver (there is no NVIDIA GPU)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  D16  skip  Test of each NIC (not asked for: deep_ep doctor --nic-test)\n"), std::string::npos)
      << text;
  for (const Check& check : all_checks()) {
    if (verdict_of(check, found) != Verdict::skip) continue;
    EXPECT_FALSE(check.absent.empty()) << check.id;
    EXPECT_NE(text.find(fmt::format("{} (", check.title)), std::string::npos) << check.id << "\n" << text;
  }
}

TEST_F(Doctor, NamesThatNobodyReadsAreListedWithTheNearestThatIsRead) {
  variables_ = {{"DEEP_EP_TIMEOUT", "5"},
                {"DEEP_EP_NIC_HANDLERS", ""},
                {"DEEP_EP_TEST_SEED", "1"},
                {"DEEP_EP_WHEEL", "1"},
                {"DEEP", "1"}};
  EXPECT_EQ(complaints("variables"),
            "warning: DEEP_EP_NIC_HANDLERS is set, but there is no such variable\n"
            "warning: DEEP_EP_TIMEOUT is set, but there is no such variable");
  const std::string text = to_text(findings());
  EXPECT_NE(text.find("did you mean DEEP_EP_TIMEOUT_S?"), std::string::npos) << text;
  EXPECT_NE(text.find("did you mean DEEP_EP_NIC_HANDLER?"), std::string::npos) << text;
}

using File = std::pair<std::string, std::optional<std::string>>;

const char* const kNoGid = "0000:0000:0000:0000:0000:0000:0000:0000";
const char* const kVerbs57 = "/usr/local/nvidia/lib64/libibverbs.so.1";
const char* const kAbi57 = "IBVERBS_PRIVATE_57 /usr/lib/x86_64-linux-gnu/libibverbs/lib%s-rdmav57.so";

/// A machine that differs from a healthy one, and the complaint of a check about it.
struct Complaint {
  const char* check;
  std::string expected;     ///< "...": and something behind
  std::vector<File> files;  ///< written; nullopt: removed
  Variables variables{};
  test::MachineOptions machine{};
  std::string means{};  ///< what users see of it
};

std::string limit(const char* name, const char* soft, const char* hard) {
  return fmt::format("{:<25} {:<20} {:<20} files     ", name, soft, hard);
}

const File kNoPrivilege = {"/proc/self/status", "Name:\tdeep_ep\nCapEff:\t00000000a80425fb"};
const File kNoOverride = {"/proc/driver/nvidia/params", "RegistryDwords: \"\""};
const File kClosedModules = {"/proc/driver/nvidia/version",
                             "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.09  Release"};
const File kNoPeermem = {"/sys/module/nvidia_peermem", std::nullopt};
const File kNetwork = {
    "/etc/podinfo/annotations",
    "a=\"b\"\nnetworking.gke.io/interfaces=\"[\\n {\\\"interfaceName\\\":\\\"eth0\\\",\\\"network\\\":\\\"default\\\"},"
    "{\\\"interfaceName\\\":\\\"gpu0rdma0\\\",\\\"network\\\":\\\"rdma-0\\\"}]\"\nbroken line"};

const Complaint kComplaints[] = {
    {"variables", "error: environment variable DEEP_EP_TIMEOUT_S='soon'...", {}, {{"DEEP_EP_TIMEOUT_S", "soon"}}},
    {"gid",
     "error: mlx5_2 port 1: all GIDs are zero",
     {{"/sys/class/infiniband/mlx5_2/ports/1/gids/0", kNoGid},
      {"/sys/class/infiniband/mlx5_2/ports/1/gids/1", kNoGid},
      {"/sys/class/infiniband/mlx5_2/ports/1/gids/2", kNoGid},
      {"/sys/class/infiniband/mlx5_2/ports/1/gids/3", kNoGid}},
     {},
     {},
     "network namespace"},
    {"port",
     "error: mlx5_5 port 1 is DOWN (link: Disabled)",
     {{"/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN"},
      {"/sys/class/infiniband/mlx5_5/ports/1/phys_state", "3: Disabled"}}},
    {"map",
     "warning: mlx5_4 port 1 carries the traffic of 2 GPUs, each gets a share of its bandwidth: GPU 4 (0000:33:00.0), "
     "GPU 5 (0000:34:00.0)",
     {{"/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN"}}},
    {"doorbell",
     "warning: PeerMappingOverride is not set, and this process is not privileged",
     {kNoOverride, kNoPrivilege}},
    {"doorbell",  // asked for, so it must work
     "error: PeerMappingOverride is not set, and this process is not privileged",
     {kNoOverride, kNoPrivilege},
     {{"NVSHMEM_IBGDA_NIC_HANDLER", "gpu"}}},
    {"doorbell",
     "note: PeerMappingOverride is not set, but this process is privileged (CAP_SYS_ADMIN, CAP_SYS_RAWIO)",
     {kNoOverride}},
    {"device_file",
     "error: mlx5_0: /dev/infiniband/uverbs0 is missing\nerror: mlx5_1: ...",
     {{"/dev/infiniband", std::nullopt}}},
    {"nic", "warning: there is no RDMA device", {}, {}, {.with_nics = false}},
    {"libraries",
     "note: libibverbs.so.1 is not on this machine",
     {{"/usr/lib/x86_64-linux-gnu", std::nullopt}},
     {},
     {.with_nics = false}},
    {"registration",
     "error: neither dma-buf (the driver is not the one with open kernel modules) nor a peer memory module is "
     "available",
     {kClosedModules, kNoPeermem}},
    {"registration", "", {kClosedModules, kNoPeermem, {"/sys/kernel/mm/memory_peers/nv_mem/version", "1.3"}}},
    {"registration",
     "error: neither dma-buf (kernel 5.4.0-200-generic is older than 5.12) nor a peer memory module is available",
     {kNoPeermem, {"/proc/sys/kernel/osrelease", "5.4.0-200-generic"}}},
    {"libraries", "error: libibverbs.so.1 is not on this machine", {{"/usr/lib/x86_64-linux-gnu", std::nullopt}}},
    {"variables",
     "note: NVSHMEM_IB_GID_INDEX=3\nnote: NCCL_IB_TC=52\nnote: NVSHMEM_ENABLE_NIC_PE_MAPPING=1\n"
     "note: NCCL_NET=gIB\nwarning: GDRCOPY_HOME=/opt/deepep/gdrcopy: there is no such folder\n"
     "error: TORCH_NCCL_USE_COMM_NONBLOCKING=0 beside NCCL_NET=gIB",
     {},
     {{"NVSHMEM_IB_GID_INDEX", "3"},
      {"NCCL_IB_TC", "52"},
      {"NVSHMEM_ENABLE_NIC_PE_MAPPING", "1"},
      {"GDRCOPY_HOME", "/opt/deepep/gdrcopy"},
      {"NCCL_NET", "gIB"},
      {"TORCH_NCCL_USE_COMM_NONBLOCKING", "0"}}},
    {"variables",
     "note: NCCL_P2P_DISABLE=1\nnote: NCCL_MNNVL_ENABLE=0\nnote: NCCL_SOCKET_IFNAME=eth\nnote: TP_SOCKET_IFNAME=eth0",
     {{"/sys/class/net/eth0/mtu", "1500"}},
     {{"NCCL_P2P_DISABLE", "1"},
      {"NVSHMEM_DISABLE_P2P", "0"},
      {"NCCL_MNNVL_ENABLE", "0"},
      {"NCCL_SOCKET_IFNAME", "eth"},
      {"TP_SOCKET_IFNAME", "eth0"},
      {"NCCL_SOCKET_FAMILY", "IPv4"}}},
    {"variables",
     "warning: DEEP_EP_HCA_LIST=^mlx5_3,mlx5_77:1: there is no NIC mlx5_77\n"
     "warning: DEEP_EP_SOCKET_IFNAME=eth8,ib: there is no interface ib",
     {{"/sys/class/net/eth8/mtu", "1500"}},
     {{"DEEP_EP_SOCKET_IFNAME", "eth8,ib"}, {"DEEP_EP_HCA_LIST", "^mlx5_3,mlx5_77:1"}}},
    {"variables",
     "error: environment variable DEEP_EP_DEVICE_TO_HCA_MAPPING='0:mlx5_0,1': entry 2, '1': it has 1 parts with "
     "':' between them, allowed: 2 to 3; allowed: <CUDA id or GPU UUID>:<hca>[:<port>],...",
     {},
     {{"DEEP_EP_DEVICE_TO_HCA_MAPPING", "0:mlx5_0,1"}}},
    {"driver", "error: NVIDIA A100-SXM4-80GB has compute capability 8.0", {}, {}, {.model = "NVIDIA A100-SXM4-80GB"}},
    {"imex", "warning: /dev/nvidia-caps-imex-channels is missing or empty", {}, {}, {.model = "NVIDIA GB200"}},
    {"shared_memory", "warning: /dev/shm has 64.00 MiB", {{"/proc/mounts", "tmpfs /dev/shm tmpfs rw,size=64m 0 0"}}},
    {"open_files",
     "warning: a process may have 256 open files",
     {kNoPrivilege, {"/proc/self/limits", limit("Max open files", "256", "524288")}}},
    {"open_files",  // the hard limit, too
     "error: a process may have 256 open files",
     {kNoPrivilege, {"/proc/self/limits", limit("Max open files", "256", "256")}}},
    {"locked_memory",
     "warning: locked memory is limited to 8.00 MiB",
     {kNoPrivilege, {"/proc/self/limits", limit("Max locked memory", "8388608", "unlimited")}}},
    {"mtu",
     "warning: mlx5_1 port 1: the MTU of eth2 is 1500",
     {{"/sys/class/net/eth1/mtu", "9000"}, {"/sys/class/net/eth2/mtu", "1500"}}},
    {"firmware",
     "note: NICs differ in their firmware: 28.41.1000, 28.43.1014",
     {{"/sys/class/infiniband/mlx5_7/fw_ver", "28.43.1014"}}},
    {"gib", "error: NCCL_NET=gIB, but there is no /usr/local/gib", {}, {{"NCCL_NET", "gIB"}}},
    {"gib",
     "warning: NCCL_NET=gIB, but LD_LIBRARY_PATH lacks /usr/local/gib/lib64",
     {{"/usr/local/gib/lib64/libnccl-net_internal.so", ""}},
     {{"NCCL_NET", "gIB"}}},
    {"pod_networks",
     "error: the annotation networking.gke.io/interfaces asks for interfaces that are not there: gpu0rdma0",
     {kNetwork, {"/sys/class/net/eth0/mtu", "1460"}}},
    {"libraries", "warning: RDMAV_DRIVERS=/x", {}, {{"RDMAV_DRIVERS", "/x"}}},
    // The host's rdma-core 57 in the driver's folder, the image's 50 where the loader looks by default.
    {"libraries",
     "warning: another release lies in /usr/local/nvidia/lib64/libibverbs.so.1 (private ABI 57); "
     "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0 (private ABI 34) is what loads",
     {{kVerbs57, kAbi57}}},
    {"libraries",
     "error: /usr/local/nvidia/lib64/libibverbs.so.1 (private ABI 57) ...",
     {{kVerbs57, kAbi57}, {"/etc/ld.so.conf.d/nvidia.conf", "# the driver's\n/usr/local/nvidia/lib64"}}},
    {"libraries",
     "error: /usr/local/nvidia/lib64/libibverbs.so.1 (private ABI 57) and "
     "/usr/lib/x86_64-linux-gnu/libmlx5.so.1.24.50.0 (private ABI 34) are of different releases...",
     {{kVerbs57, kAbi57}, {"/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav57.so", "copied there"}},
     {{"LD_LIBRARY_PATH", "/usr/local/nvidia/lib64"}},
     {},
     "version 'IBVERBS_PRIVATE_34' not found"},
    {"libraries",
     "error: /usr/local/nvidia/lib64/libibverbs.so.1 (private ABI 57) wants "
     "/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav57.so, which does not exist\n"
     "warning: another release lies in /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0 (private ABI 34); "
     "/usr/local/nvidia/lib64/libibverbs.so.1 (private ABI 57) is what loads",
     {{kVerbs57, kAbi57}, {"/usr/local/nvidia/lib64/libmlx5.so.1", "IBVERBS_PRIVATE_57"}},
     {{"LD_LIBRARY_PATH", "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"}},
     {},
     "couldn't load driver 'libmlx5-rdmav57.so'"},
};

class DoctorComplaint : public Doctor, public testing::WithParamInterface<Complaint> {};

TEST_P(DoctorComplaint, IsWhatTheMachineLacks) {
  const Complaint& one = GetParam();
  write_healthy_machine(machine_, one.machine);
  for (const auto& [path, text] : one.files) {
    if (text) {
      machine_.write(path, *text);
    } else {
      machine_.remove(path);
    }
  }
  variables_ = one.variables;
  std::string found = complaints(one.check), expected = one.expected;
  if (expected.ends_with("...")) {
    expected.resize(expected.size() - 3);
    found.resize(std::min(found.size(), expected.size()));
  }
  EXPECT_EQ(found, expected);
  for (const Finding& finding : findings()) {
    if (finding.check != one.check || finding.verdict != Verdict::error) continue;
    EXPECT_NE(finding.meaning.find(one.means), std::string::npos) << finding.meaning;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, DoctorComplaint, testing::ValuesIn(kComplaints),
                         [](const auto& info) { return fmt::format("{}_{}", info.param.check, info.index); });

// --- counters ---

class DoctorCounters : public Doctor {
 protected:
  DoctorCounters() { write_healthy_machine(machine_); }
  void count(int nic, const std::string& counter, std::uint64_t value) const {
    machine_.write(fmt::format("/sys/class/infiniband/mlx5_{}/ports/1/{}", nic, counter), std::to_string(value));
  }
  Findings traffic_after(const std::vector<PortCounters>& before) const {
    Findings findings;
    check_traffic(patient(), difference(before, read_counters(patient())), findings);
    return findings;
  }
};

TEST_F(DoctorCounters, OnlyOneNicCarriesTraffic) {
  const auto before = read_counters(patient());
  count(0, "counters/port_xmit_data", 1000 + (std::uint64_t{1} << 30));
  const Findings found = traffic_after(before);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].found, "only one NIC carries traffic");
  EXPECT_EQ(found[0].verdict, Verdict::error);
  EXPECT_NE(found[0].meaning.find("mlx5_1 (0 bytes), mlx5_2 (0 bytes)"), std::string::npos) << found[0].meaning;
  EXPECT_EQ(found[0].meaning.find("mlx5_0"), std::string::npos);
}

TEST_F(DoctorCounters, AllCarryTheirShare) {
  const auto before = read_counters(patient());
  for (int nic = 0; nic < 8; ++nic) count(nic, "counters/port_xmit_data", 1000 + 262144);
  const Findings found = traffic_after(before);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].found, "8 NICs carried 1.00 MiB each on average") << "words of four bytes";
  EXPECT_EQ(found[0].verdict, Verdict::ok);
}

TEST_F(DoctorCounters, OneLagsBehindAndOneLosesPackets) {
  count(4, "counters/port_xmit_discards", 9);
  const auto before = read_counters(patient());
  for (int nic = 0; nic < 7; ++nic) count(nic, "counters/port_rcv_data", 1000 + 262144);
  count(7, "counters/port_rcv_data", 1000 + 65536);
  count(3, "hw_counters/out_of_sequence", 17);
  count(4, "counters/port_xmit_discards", 5);  // went back: the driver was reloaded
  const Findings found = traffic_after(before);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].found, "1 of 8 NICs carry less than half of the average");
  EXPECT_EQ(found[1].found, "mlx5_3 port 1: out_of_sequence 17");
  EXPECT_EQ(found[1].verdict, Verdict::warning);
}

TEST_F(DoctorCounters, CommandsRunAndTellTheirStatus) {
  EXPECT_EQ(run_command({"true"}, false), 0);
  EXPECT_EQ(run_command({"sh", "-c", "exit 7"}, false), 7);
  EXPECT_EQ(run_command({"sh", "-c", "kill -9 $$"}, false), 137);
  EXPECT_EQ(run_command({"/no/such/command"}, false), 127);
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_command({"sh", "-c", "echo not for the report >&1"}, true), 0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

}  // namespace
}  // namespace deep_ep::tools
