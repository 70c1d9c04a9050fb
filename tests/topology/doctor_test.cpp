// What `deep_ep doctor` says about healthy machines, and about machines that each lack something.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/support/variables.hpp"
#include "tests/topology/doctor_fixture.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/counters.hpp"
#include "tools/doctor/machine.hpp"

namespace deep_ep::tools {
namespace {

TEST_F(Doctor, AHealthyMachineHasNothingWorseThanOk) {
  write_healthy_machine(machine_);
  const Findings found = findings();
  EXPECT_EQ(worst_of(found), Verdict::ok) << to_text(found);
  std::string checks;
  for (const Finding& finding : found) {
    if (finding.verdict != Verdict::skip) checks += finding.id + ":" + finding.check + " ";
  }
  EXPECT_EQ(checks,
            "D1:driver D2:gpu D3:locked_memory D3:open_files D3:shared_memory D4:nic D5:gid D6:map D7:libraries "
            "D8:registration D9:doorbell "
            "D10:device_file ");
  EXPECT_TRUE(to_text(found).ends_with("0 errors, 0 warnings\n")) << to_text(found);
  const std::string text = machine_text(patient());
  EXPECT_NE(text.find("GPU 7 (0000:44:00.0) -> mlx5_7 port 1, 400 Gb/s, GID 3 (RoCE v2, 10.0.7.1, eth8), PIX"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("      GID 3: RoCE v2, 10.0.7.1, eth8  <- used\n"), std::string::npos) << text;
}

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
                {"DEEP_EP_UNITY_PROGRAMS", "1"},
                {"DEEP", "1"}};
  EXPECT_EQ(complaints("variables"),
            "warning: DEEP_EP_NIC_HANDLERS is set, but there is no such variable\n"
            "warning: DEEP_EP_TIMEOUT is set, but there is no such variable");
  const std::string text = to_text(findings());
  EXPECT_NE(text.find("did you mean DEEP_EP_TIMEOUT_S?"), std::string::npos) << text;
  EXPECT_NE(text.find("did you mean DEEP_EP_NIC_HANDLER?"), std::string::npos) << text;
}

TEST_F(Doctor, WrongValuesOfVariablesThatNobodyReadsHere) {
  write_healthy_machine(machine_);
  variables_["DEEP_EP_TIMEOUT_S"] = "soon";
  variables_["DEEP_EP_HOST_THREADS"] = "-1";
  variables_["DEEP_EP_LOW_LATENCY_RAILS"] = "never";
  const std::string text = complaints("variables");
  EXPECT_NE(text.find("error: environment variable DEEP_EP_TIMEOUT_S='soon'"), std::string::npos) << text;
  EXPECT_NE(text.find("error: environment variable DEEP_EP_HOST_THREADS='-1'"), std::string::npos) << text;
  EXPECT_EQ(text.find("RAILS"), std::string::npos) << text;
}

TEST_F(Doctor, ZeroGids) {
  write_healthy_machine(machine_);
  for (int gid = 0; gid < 4; ++gid) {
    machine_.write(fmt::format("/sys/class/infiniband/mlx5_2/ports/1/gids/{}", gid),
                   "0000:0000:0000:0000:0000:0000:0000:0000");
  }
  EXPECT_EQ(complaints("gid"), "error: mlx5_2 port 1: all GIDs are zero");
  for (const Finding& finding : findings()) {
    if (finding.check != "gid") continue;
    EXPECT_NE(finding.meaning.find("network namespace"), std::string::npos);
    EXPECT_NE(finding.action.find("IPv4 address"), std::string::npos);
  }
}

TEST_F(Doctor, OnePortDown) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN");
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/phys_state", "3: Disabled");
  EXPECT_EQ(complaints("port"), "error: mlx5_5 port 1 is DOWN (link: Disabled)");
  EXPECT_EQ(complaints("map"),
            "warning: mlx5_4 port 1 carries the traffic of 2 GPUs, each gets a share of its bandwidth: GPU 4 "
            "(0000:33:00.0), GPU 5 (0000:34:00.0)");
}

TEST_F(Doctor, NoPrivilege) {
  write_healthy_machine(machine_);
  machine_.write("/proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nRegistryDwords: \"\"");
  machine_.write("/proc/self/status", "Name:\tdeep_ep\nCapEff:\t00000000a80425fb");
  machine_.write("/proc/self/limits",
                 "Limit                     Soft Limit           Hard Limit           Units     \n"
                 "Max locked memory         8388608              8388608              bytes     ");
  EXPECT_EQ(complaints("doorbell"), "warning: PeerMappingOverride is not set, and this process is not privileged");
  EXPECT_EQ(complaints("locked_memory"), "warning: locked memory is limited to 8.00 MiB");
  variables_["NVSHMEM_IBGDA_NIC_HANDLER"] = "gpu";
  EXPECT_EQ(complaints("doorbell"), "error: PeerMappingOverride is not set, and this process is not privileged")
      << "asked for, so it must work";
  variables_["DEEP_EP_NIC_HANDLER"] = "cpu";
  EXPECT_EQ(complaints("doorbell"), "note: the NIC handler is cpu by a variable");
}

TEST_F(Doctor, PrivilegedContainersNeedNoDriverOption) {
  write_healthy_machine(machine_);
  machine_.write("/proc/driver/nvidia/params", "RegistryDwords: \"\"");
  EXPECT_EQ(complaints("doorbell"),
            "note: PeerMappingOverride is not set, but this process is privileged (CAP_SYS_ADMIN, CAP_SYS_RAWIO)");
  machine_.write("/sys/module/nvidia/version", "470.82.01");
  EXPECT_EQ(complaints("doorbell"), "warning: driver 470.82.01 is older than 510.40.3");
}

TEST_F(Doctor, DeviceFilesThatTheContainerLacks) {
  write_healthy_machine(machine_);
  machine_.remove("/dev/infiniband");
  const std::string text = complaints("device_file");
  EXPECT_TRUE(text.starts_with("error: mlx5_0: /dev/infiniband/uverbs0 is missing\nerror: mlx5_1: ")) << text;
  EXPECT_NE(complaints("map").find("error: GPU 0 (0000:13:00.0) -> no NIC: there is no usable NIC"), std::string::npos);
}

TEST_F(Doctor, NoRdmaAtAll) {
  write_healthy_machine(machine_, {.with_nics = false});
  machine_.remove("/usr/lib/x86_64-linux-gnu");
  const Findings found = findings();
  EXPECT_EQ(worst_of(found), Verdict::warning) << "the library works on one machine\n" << to_text(found);
  EXPECT_EQ(complaints("nic"), "warning: there is no RDMA device");
  EXPECT_EQ(complaints("libraries"), "note: libibverbs.so.1 is not on this machine");
  EXPECT_EQ(complaints("map"), "");
}

TEST_F(Doctor, Registration) {
  write_healthy_machine(machine_);
  machine_.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.09  Release");
  EXPECT_EQ(complaints("registration"), "") << "nvidia-peermem is there";
  machine_.remove("/sys/module/nvidia_peermem");
  EXPECT_EQ(complaints("registration"),
            "error: neither dma-buf (the driver is not the one with open kernel modules) nor a peer memory module is "
            "available");
  machine_.write("/sys/kernel/mm/memory_peers/nv_mem/version", "1.3");
  EXPECT_EQ(complaints("registration"), "");
  machine_.remove("/sys/kernel/mm/memory_peers");
  machine_.write("/proc/sys/kernel/osrelease", "5.4.0-200-generic");
  EXPECT_EQ(
      complaints("registration"),
      "error: neither dma-buf (kernel 5.4.0-200-generic is older than 5.12) nor a peer memory module is available");
}

// Seed 002: the host's rdma-core 57 in the driver's folder, the image's 50 where the loader looks by default.
class DoctorLibraries : public Doctor {
 protected:
  DoctorLibraries() {
    write_healthy_machine(machine_);
    const std::string folder = "/usr/local/nvidia/lib64";
    machine_.write(folder + "/libibverbs.so.1.14.56.0",
                   "IBVERBS_PRIVATE_57 /usr/lib/x86_64-linux-gnu/libibverbs/lib%s-rdmav57.so");
    machine_.link(folder + "/libibverbs.so.1", "libibverbs.so.1.14.56.0");
  }
  void add_mlx5() { machine_.write("/usr/local/nvidia/lib64/libmlx5.so.1", "IBVERBS_PRIVATE_57"); }
};

TEST_F(DoctorLibraries, TheDriverOfTheOtherReleaseIsMissing) {
  add_mlx5();
  variables_["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64:/usr/local/nvidia/lib";
  const std::string text = complaints("libraries");
  EXPECT_EQ(text,
            "error: /usr/local/nvidia/lib64/libibverbs.so.1.14.56.0 (private ABI 57) wants "
            "/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav57.so, which does not exist\n"
            "warning: another release lies in /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0 (private ABI 34); "
            "/usr/local/nvidia/lib64/libibverbs.so.1.14.56.0 (private ABI 57) is what loads");
  for (const Finding& finding : findings()) {
    if (finding.verdict != Verdict::error) continue;
    EXPECT_NE(finding.meaning.find("couldn't load driver 'libmlx5-rdmav57.so'"), std::string::npos) << "what users see";
  }
}

TEST_F(DoctorLibraries, TheTwoDoNotLoadTogether) {
  machine_.write("/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav57.so", "copied there");
  variables_["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64";
  EXPECT_TRUE(complaints("libraries")
                  .starts_with("error: /usr/local/nvidia/lib64/libibverbs.so.1.14.56.0 (private ABI 57) and "
                               "/usr/lib/x86_64-linux-gnu/libmlx5.so.1.24.50.0 (private ABI 34) are of different "
                               "releases"))
      << complaints("libraries");
  for (const Finding& finding : findings()) {
    if (finding.verdict != Verdict::error) continue;
    EXPECT_NE(finding.meaning.find("version 'IBVERBS_PRIVATE_34' not found"), std::string::npos) << "what users see";
  }
}

TEST_F(DoctorLibraries, ACopyBesideIsAWarning) {
  EXPECT_EQ(complaints("libraries"),
            "warning: another release lies in /usr/local/nvidia/lib64/libibverbs.so.1.14.56.0 (private ABI 57); "
            "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0 (private ABI 34) is what loads");
  machine_.write("/etc/ld.so.conf.d/nvidia.conf", "# the driver's\n/usr/local/nvidia/lib64");
  EXPECT_TRUE(complaints("libraries").starts_with("error: ")) << "now it is what loads";
}

TEST_F(DoctorLibraries, DriversByAVariable) {
  machine_.remove("/usr/local/nvidia");
  variables_["RDMAV_DRIVERS"] = "/usr/local/nvidia/lib64/libibverbs";
  EXPECT_EQ(complaints("libraries"), "warning: RDMAV_DRIVERS=/usr/local/nvidia/lib64/libibverbs");
  variables_.clear();
  machine_.remove("/usr/lib/x86_64-linux-gnu");
  EXPECT_EQ(complaints("libraries"), "error: libibverbs.so.1 is not on this machine");
}

TEST_F(Doctor, VariablesOfOthers) {
  write_healthy_machine(machine_);
  variables_ = {{"NVSHMEM_IB_GID_INDEX", "3"},
                {"NCCL_IB_TC", "52"},
                {"NCCL_IB_TIMEOUT", "99"},
                {"NVSHMEM_ENABLE_NIC_PE_MAPPING", "1"},
                {"GDRCOPY_HOME", "/opt/deepep/gdrcopy"},
                {"NCCL_NET", "gIB"},
                {"TORCH_NCCL_USE_COMM_NONBLOCKING", "0"}};
  EXPECT_EQ(complaints("variables"),
            "note: NVSHMEM_IB_GID_INDEX=3\nnote: NCCL_IB_TC=52\nnote: NVSHMEM_ENABLE_NIC_PE_MAPPING=1\n"
            "note: NCCL_NET=gIB\nwarning: GDRCOPY_HOME=/opt/deepep/gdrcopy: there is no such folder\n"
            "error: TORCH_NCCL_USE_COMM_NONBLOCKING=0 beside NCCL_NET=gIB");
  EXPECT_EQ(complaints("map"), "warning: NCCL_IB_TIMEOUT='99' is ignored: not a number from 0 to 31");
}

TEST_F(Doctor, VariablesOfOthersThatSwitchOffOrNameInterfaces) {
  variables_ = {{"NCCL_P2P_DISABLE", "1"},      {"NVSHMEM_DISABLE_P2P", "0"}, {"NCCL_MNNVL_ENABLE", "0"},
                {"NCCL_SOCKET_IFNAME", "eth0"}, {"TP_SOCKET_IFNAME", "eth0"}, {"NCCL_SOCKET_FAMILY", "IPv4"}};
  EXPECT_EQ(complaints("variables"),
            "note: NCCL_P2P_DISABLE=1\nnote: NCCL_MNNVL_ENABLE=0\nnote: NCCL_SOCKET_IFNAME=eth0\n"
            "note: TP_SOCKET_IFNAME=eth0");
  variables_ = {{"DEEP_EP_NVLINK", "no"}};
  EXPECT_EQ(complaints("variables"), "error: environment variable DEEP_EP_NVLINK='no': not one of on|off");
}

TEST_F(Doctor, ListsOfDevicesThatAreNotThere) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/net/eth8/mtu", "1500");
  variables_["DEEP_EP_SOCKET_IFNAME"] = "eth8,ib";
  variables_["DEEP_EP_HCA_LIST"] = "^mlx5_3,mlx5_77:1";
  EXPECT_EQ(complaints("variables"),
            "warning: DEEP_EP_HCA_LIST=^mlx5_3,mlx5_77:1: there is no NIC mlx5_77\n"
            "warning: DEEP_EP_SOCKET_IFNAME=eth8,ib: there is no interface ib");
  variables_ = {{"DEEP_EP_SOCKET_IFNAME", "eth,"}, {"NCCL_IB_HCA", "mlx5"}};
  const std::string text = complaints("variables");
  EXPECT_NE(text.find("error: environment variable DEEP_EP_SOCKET_IFNAME='eth,'"), std::string::npos) << text;
  EXPECT_EQ(text.find("there is no"), std::string::npos) << text;
}

TEST_F(Doctor, AMalformedMapping) {
  write_healthy_machine(machine_);
  variables_["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = "0:mlx5_0,1";
  EXPECT_EQ(complaints("variables"),
            "error: environment variable DEEP_EP_DEVICE_TO_HCA_MAPPING='0:mlx5_0,1': entry 2, '1': there is no ':' "
            "between GPU and HCA; allowed: <CUDA id or GPU UUID>:<hca>[:<port>],...");
  variables_["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = "0:mlx5_0,1:mlx5_0";
  EXPECT_NE(complaints("map").find("warning: mlx5_0 port 1 carries the traffic of 2 GPUs"), std::string::npos);
  EXPECT_NE(complaints("map").find("error: GPU 2 (0000:23:00.0) -> no NIC: DEEP_EP_DEVICE_TO_HCA_MAPPING does not name "
                                   "it"),
            std::string::npos);
}

TEST_F(Doctor, CudaVisibleDevices) {
  write_healthy_machine(machine_);
  variables_["CUDA_VISIBLE_DEVICES"] = "3," + test::gpu_uuid(1);
  EXPECT_EQ(
      complaints("cuda_visible_devices"),
      fmt::format("note: CUDA_VISIBLE_DEVICES=3,{}: CUDA device 0 is GPU 3 (0000:24:00.0), CUDA device 1 is GPU 1 "
                  "(0000:14:00.0)",
                  test::gpu_uuid(1)));
  variables_["CUDA_VISIBLE_DEVICES"] = "0,8";
  EXPECT_EQ(complaints("cuda_visible_devices"), "error: CUDA_VISIBLE_DEVICES='0,8': there is no GPU 8");
}

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

TEST_F(DoctorCounters, OnlyNicsOfVisibleGpusCount) {
  variables_["CUDA_VISIBLE_DEVICES"] = "0,1";
  const auto before = read_counters(patient());
  for (int nic = 0; nic < 2; ++nic) count(nic, "counters/port_xmit_data", 1000 + 262144);
  EXPECT_EQ(traffic_after(before).at(0).found, "2 NICs carried 1.00 MiB each on average");
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
  EXPECT_THROW(run_command({"/no/such/command"}, false), SystemError);
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_command({"sh", "-c", "echo not for the report >&1"}, true), 0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

}  // namespace
}  // namespace deep_ep::tools
