// Whole machines as files: the verdict of every check, whether the machine is usable, and what --report says of it.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "tests/topology/doctor_fixture.hpp"
#include "tools/doctor/bundle.hpp"
#include "tools/doctor/catalogue.hpp"
#include "tools/doctor/cgroup.hpp"
#include "tools/doctor/clock.hpp"
#include "tools/doctor/ethtool.hpp"
#include "tools/doctor/machine_report.hpp"
#include "tools/doctor/needs.hpp"
#include "tools/doctor/print.hpp"
#include "tools/doctor/quick.hpp"

namespace deep_ep::tools {
namespace {

class Sysroot : public Doctor {
 protected:
  /// "D4 fail, D6 warn": all checks that are neither ok nor skipped.
  std::string verdicts() const {
    const Findings found = findings();
    std::string text;
    for (const Check& check : all_checks()) {
      const Verdict verdict = verdict_of(check, found);
      if (verdict < Verdict::warning) continue;
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", check.id, word_of(verdict));
    }
    return text.empty() ? "all ok" : text;
  }
  std::string skipped() const {
    const Findings found = findings();
    std::string text;
    for (const Check& check : all_checks()) {
      if (verdict_of(check, found) == Verdict::skip) text += fmt::format("{}{}", text.empty() ? "" : " ", check.id);
    }
    return text;
  }
  static Findings found_by(void (*check)(const Patient&, Findings&), const Patient& patient) {
    Findings found;
    check(patient, found);
    return found;
  }
  bool usable() const { return answer_quickly(patient(), {}).usable; }
  std::string report() const { return to_text(report_machine(patient(), "1.2.3")); }
};

TEST_F(Sysroot, HealthyA4) {
  write_healthy_machine(machine_);
  EXPECT_EQ(verdicts(), "all ok");
  EXPECT_EQ(skipped(), "D12 D13 D14 D15 D16 D18 D21 D22");
  EXPECT_TRUE(usable());
  EXPECT_EQ(report(),
            "deep_ep           1.2.3\n"
            "Host              node-0\n"
            "Boot              11111111-2222-3333-4444-555555555555\n"
            "Machine           Google Compute Engine\n"
            "GPUs              8 x NVIDIA B200\n"
            "GPU memory        8 x 180 GB (as sold)\n"
            "NVIDIA driver     580.126.09\n"
            "NICs              8 x 400 Gb/s RoCE (mlx5_core)\n"
            "NIC firmware      8 x 28.41.1000\n"
            "GIDs              8 x RoCE v2\n"
            "Operating system  Ubuntu 24.04.3 LTS\n"
            "Kernel            6.14.0-1021-gcp\n"
            "RDMA driver       the kernel's own\n"
            "libibverbs        libibverbs.so.1.14.50.0 (private ABI 34)\n"
            "libmlx5           libmlx5.so.1.24.50.0 (private ABI 34)\n"
            "nvidia-peermem    580.126.09\n");
}

struct WholeMachine {
  const char* name;
  void (*write)(const test::FakeMachine&, Variables&);
  const char* verdicts;
  bool usable;
  const char* reported = "";
};

const WholeMachine kWholeMachines[] = {
    {"ZeroGids",
     [](const test::FakeMachine& machine, Variables&) {
       write_healthy_machine(machine);
       for (int nic = 0; nic < 8; ++nic) {
         for (int gid = 0; gid < 4; ++gid) {
           machine.write(fmt::format("/sys/class/infiniband/mlx5_{}/ports/1/gids/{}", nic, gid),
                         "0000:0000:0000:0000:0000:0000:0000:0000");
         }
       }
     },
     "D5 fail, D6 fail", false, "GIDs              8 x no GID\n"},
    {"RenamedNics",
     [](const test::FakeMachine& machine, Variables&) {
       write_healthy_machine(machine,
                             {.nic_names = {"roce_rail0", "roce_rail1", "rocep9s0", "d", "c", "b2", "b", "a"}});
     },
     "all ok", true, "NICs              8 x 400 Gb/s RoCE (mlx5_core)\n"},
    {"TwoReleasesOfRdmaCore",  // --quick reads no libraries
     [](const test::FakeMachine& machine, Variables& variables) {
       write_healthy_machine(machine);
       machine.write("/usr/local/nvidia/lib64/libibverbs.so.1",
                     "IBVERBS_PRIVATE_57 /usr/lib/x86_64-linux-gnu/libibverbs/lib%s-rdmav57.so");
       variables["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64";
     },
     "D7 fail", true, "libibverbs        libibverbs.so.1 (private ABI 57)\n"},
    {"OneNicDown",
     [](const test::FakeMachine& machine, Variables&) {
       write_healthy_machine(machine);
       machine.write("/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN");
     },
     "D4 fail, D6 warn", false},
    {"NoPrivilege",
     [](const test::FakeMachine& machine, Variables&) {
       write_healthy_machine(machine);
       machine.remove("/dev/infiniband");
       machine.write("/proc/driver/nvidia/params", "RegistryDwords: \"\"");
       machine.write("/proc/self/status", "Name:\tdeep_ep\nCapEff:\t00000000a80425fb");
       machine.write("/proc/self/limits",
                     "Max locked memory         8388608              8388608              bytes     ");
       machine.write("/proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0");
     },
     "D3 warn, D6 fail, D9 warn, D10 fail", false},
    {"NoRdma",  // for runs of one machine; --nics says otherwise
     [](const test::FakeMachine& machine, Variables&) { write_healthy_machine(machine, {.with_nics = false}); },
     "D4 warn", true, "NICs              none\n"}};

TEST_F(Sysroot, WholeMachines) {
  for (const WholeMachine& one : kWholeMachines) {
    SCOPED_TRACE(one.name);
    machine_.remove("/");
    variables_.clear();
    one.write(machine_, variables_);
    EXPECT_EQ(verdicts(), one.verdicts);
    EXPECT_EQ(usable(), one.usable);
    EXPECT_NE(report().find(one.reported), std::string::npos) << report();
  }
  EXPECT_FALSE(answer_quickly(patient(), {.nics = 1}).usable) << "the last has none";
}

TEST_F(Sysroot, Gb200) {
  write_gb200_machine(machine_);
  EXPECT_EQ(verdicts(), "all ok");
  EXPECT_TRUE(usable());
  EXPECT_NE(report().find("GPUs              4 x NVIDIA GB200\nGPU memory        4 x 192 GB (as sold)\n"),
            std::string::npos)
      << report();
  machine_.remove("/dev/nvidia-caps-imex-channels");
  EXPECT_EQ(verdicts(), "D2 warn");
}

TEST_F(Sysroot, H200WithInfiniBand) {
  write_h200_machine(machine_);
  EXPECT_EQ(verdicts(), "all ok");
  EXPECT_EQ(complaints("known_bad"), "note: NVIDIA driver 580.126.09");
  EXPECT_TRUE(usable());
  EXPECT_NE(report().find("GPUs              8 x NVIDIA H200\nGPU memory        8 x 141 GB (as sold)\n"),
            std::string::npos)
      << report();
  EXPECT_NE(report().find("NICs              8 x 400 Gb/s InfiniBand (mlx5_core)\n"), std::string::npos) << report();
}

// --- single checks ---

TEST_F(Sysroot, TheBuildMustFitTheGpu) {
  write_healthy_machine(machine_, {.model = "NVIDIA B300"});
  const auto about_code = [&](const std::vector<std::string>& architectures) {
    Findings found;
    Patient b300 = patient();
    b300.build.architectures = architectures;
    check_driver(b300, found);
    for (const Finding& one : found) {
      if (one.found.starts_with("this build has no code")) return one.found;
    }
    return std::string();
  };
  EXPECT_EQ(about_code({"90a-real", "100-real", "90-virtual"}), "") << "machine code of 10.0 loads on 10.3";
  EXPECT_EQ(about_code({"100f-real"}), "");
  EXPECT_EQ(about_code({"90a-real", "100a-real"}),
            "this build has no code for NVIDIA B300 (compute capability 10.3), only for 90a-real, 100a-real");
  EXPECT_EQ(about_code({"90-real", "110-real"}),
            "this build has no code for NVIDIA B300 (compute capability 10.3), only for 90-real, 110-real");
  EXPECT_EQ(
      about_code({"90a-real", "100a-real", "90-virtual"}),
      "this build has no code of its own for NVIDIA B300 (compute capability 10.3), only for 90a-real, 100a-real, "
      "90-virtual");
  machine_.write("/sys/module/nvidia/version", "550.54.15");
  EXPECT_NE(complaints("driver").find("error: driver 550.54.15 is older than 575, the first for NVIDIA B300"),
            std::string::npos);
}

TEST_F(Sysroot, OldGpusAreRefused) {
  write_healthy_machine(machine_, {.model = "NVIDIA A100-SXM4-80GB"});
  EXPECT_EQ(complaints("driver"), "error: NVIDIA A100-SXM4-80GB has compute capability 8.0");
}

TEST_F(Sysroot, NvLinksThatAreDown) {
  write_healthy_machine(machine_);
  Patient live = patient();
  live.live_gpus = {{"0000:13:00.0", "NVIDIA B200", 1, 1, 100, 18, 0},
                    {"0000:14:00.0", "NVIDIA B200", 1, 1, 100, 17, 1}};
  EXPECT_EQ(found_by(check_nvlink, live).at(0).found, "18 NVLinks of a GPU are up, but 0000:14:00.0 has 17");
  for (LiveGpu& gpu : *live.live_gpus) gpu.links = 0;
  EXPECT_EQ(found_by(check_nvlink, live).at(0).found, "no GPU has an NVLink that is up");
  EXPECT_FALSE(ask_nvml("/no/such/library.so"));
}

TEST_F(Sysroot, GpusThatDoNotReachEachOther) {
  write_healthy_machine(machine_);
  Patient live = patient();
  const auto gpu = [](const char* pci, std::vector<std::optional<bool>> reaches) {
    return LiveGpu{pci, "NVIDIA B200", 1, 1, 100, 18, 0, std::move(reaches), {}};
  };
  live.live_gpus = {gpu("0000:13:00.0", {std::nullopt, true, true}), gpu("0000:14:00.0", {true, std::nullopt, false}),
                    gpu("0000:23:00.0", {true, std::nullopt, std::nullopt})};
  const Findings found = found_by(check_nvlink, live);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[1].found, "1 of 3 pairs of GPUs do not reach each other by NVLink: 1-2");
  EXPECT_EQ(found[1].verdict, Verdict::error);
  EXPECT_NE(machine_text(live).find("   1   +  .  -\n"), std::string::npos) << machine_text(live);
  EXPECT_EQ(machine_json(live)["nvlink"][1]["reaches"].dump(), "[true,null,false]");
  EXPECT_NE(to_text(report_machine(live, "1")).find("NVLink            2 of 3 pairs of GPUs\n"), std::string::npos);
}

TEST_F(Sysroot, DomainsOfSeveralMachines) {
  write_gb200_machine(machine_);
  Patient live = patient();
  NvLinkFabric fabric{.state = NvLinkFabric::State::completed, .cluster = "c0ffee", .clique = 3};
  live.live_gpus = {{"0000:13:00.0", "NVIDIA GB200", 1, 1, 100, 18, 0, {}, fabric},
                    {"0000:14:00.0", "NVIDIA GB200", 1, 1, 100, 18, 0, {}, fabric}};
  const auto domain = [&] {
    Findings found;
    check_nvlink(live, found);
    std::string text;
    for (const Finding& finding : found) {
      if (finding.check == "nvlink_domain") text += fmt::format("{}: {}\n", name_of(finding.verdict), finding.found);
    }
    return text;
  };
  EXPECT_EQ(domain(), "ok: NVLink domain c0ffee, clique 3\n");
  const NodeReport a{"a.json", to_json(report_machine(live, "1.2.3"))};
  EXPECT_EQ(a.report["nvlink_domain"], "c0ffee, clique 3");
  (*live.live_gpus)[1].fabric->clique = 4;
  EXPECT_EQ(domain(), "error: GPUs of this machine are in 2 NVLink domains: c0ffee, clique 3; c0ffee, clique 4\n");
  (*live.live_gpus)[0].fabric->clique = 4;
  NodeReport b{"b.json", to_json(report_machine(live, "1.2.3"))};
  b.report["boot_id"] = "another";
  b.report["host"] = "node-1";
  const Findings found = compare_nodes({a, b});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].meaning, "ranks of these nodes reach each other by NICs, not by NVLink");
  (*live.live_gpus)[0].fabric->slow_links = true;
  (*live.live_gpus)[1].fabric->state = NvLinkFabric::State::in_progress;
  EXPECT_EQ(domain(),
            "error: not registered with the NVLink fabric: 0000:14:00.0\n"
            "warning: the NVLink bandwidth of 0000:13:00.0 is degraded\nok: NVLink domain c0ffee, clique 4\n");
}

TEST_F(Sysroot, SmallSharedMemory) {
  write_healthy_machine(machine_);
  machine_.write("/proc/mounts", "tmpfs /dev/shm tmpfs rw,size=64m 0 0");
  EXPECT_EQ(complaints("shared_memory"), "warning: /dev/shm has 64.00 MiB");
}

TEST_F(Sysroot, LimitsAgainstWhatTheRunNeeds) {
  write_healthy_machine(machine_);
  const auto limit = [&](const char* name, const char* soft, const char* hard) {
    machine_.write("/proc/self/limits", fmt::format("{:<25} {:<20} {:<20} files     ", name, soft, hard));
  };
  limit("Max open files", "1024", "524288");
  EXPECT_EQ(complaints("open_files"), "") << "enough for 16 ranks";
  limit("Max open files", "256", "524288");
  EXPECT_EQ(
      complaints("open_files"),
      "warning: a process may have 256 open files, rank 0 needs about 304 (16 ranks, 8 a node, 4096 tokens of 7168 "
      "channels)");
  limit("Max open files", "256", "256");
  EXPECT_TRUE(complaints("open_files").starts_with("error: ")) << "nobody can raise it";
  machine_.write("/proc/self/status", "Name:\tdeep_ep\nCapEff:\t00000000a80425fb");
  const auto locked = [&](std::uint64_t bytes) {
    limit("Max locked memory", std::to_string(bytes).c_str(), "unlimited");
    return complaints("locked_memory").substr(0, 5);
  };
  const std::uint64_t needed = needs_of(patient()).locked_bytes;
  EXPECT_GT(needed, 0u);
  EXPECT_EQ(locked(needed - 1), "error");
  EXPECT_EQ(locked(needed), "warni");
  EXPECT_EQ(locked(needed + (std::uint64_t{64} << 20)), "");
}

TEST_F(Sysroot, ControlGroups) {
  write_healthy_machine(machine_);
  EXPECT_EQ(complaints("control_group"), "");
  machine_.write("/proc/self/cgroup", "0::/jobs/one");
  machine_.write("/sys/fs/cgroup/jobs/one/memory.max", "max");
  machine_.write("/sys/fs/cgroup/jobs/memory.max", "1048576");
  machine_.write("/sys/fs/cgroup/jobs/one/cpu.max", "150000 100000");
  machine_.write("/sys/fs/cgroup/jobs/one/pids.max", "64");
  machine_.write("/sys/fs/cgroup/rdma.max", "mlx5_0 hca_handle=0 hca_object=max\nmlx5_1 hca_handle=max hca_object=9");
  const std::string text = complaints("control_group");
  EXPECT_NE(text.find("error: the control group may use 1.00 MiB of memory, the ranks of a node need "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("warning: the control group has 1.5 CPUs for 8 ranks"), std::string::npos) << text;
  EXPECT_NE(text.find("warning: the control group may have 64 threads, 8 ranks have about 256"), std::string::npos)
      << text;
  const std::string queues = complaints("queue_pairs");
  EXPECT_NE(queues.find("error: mlx5_0: the control group may open the device 0 times, 1 ranks use it"),
            std::string::npos)
      << queues;
  EXPECT_NE(queues.find("error: mlx5_1: the control group may make 9 RDMA objects, 16 ranks"), std::string::npos)
      << queues;
}

TEST_F(Sysroot, ControlGroupsOfTheFirstVersion) {
  machine_.write("/proc/self/cgroup", "4:memory:/docker/7\n1:cpu,cpuacct:/docker/7\n8:pids:/\nbroken");
  machine_.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  machine_.write("/sys/fs/cgroup/cpu/docker/7/cpu.cfs_quota_us", "-1");
  machine_.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000");
  machine_.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  machine_.write("/sys/fs/cgroup/pids/pids.max", "1000");
  const CgroupLimits limits = read_cgroup(machine_.root());
  EXPECT_FALSE(limits.memory) << "that is no limit";
  EXPECT_EQ(limits.cpus, 4.0);
  EXPECT_EQ(limits.processes, 1000u);
}

TEST_F(Sysroot, QueuePairsThatTheNicsHave) {
  write_healthy_machine(machine_);
  Patient patient = this->patient();
  EXPECT_EQ(found_by(check_queues, patient).at(0).meaning, "far below what such NICs usually have");
  for (int i = 0; i < 8; ++i) patient.live_queue_pairs[fmt::format("mlx5_{}", i)] = 1 << 17;
  EXPECT_EQ(found_by(check_queues, patient).at(0).meaning, "far below what the NICs say they have");
  patient.live_queue_pairs["mlx5_3"] = 4;
  const Findings found = found_by(check_queues, patient);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].verdict, Verdict::error);
  EXPECT_TRUE(found[0].found.ends_with("the device has 4")) << found[0].found;
}

TEST_F(Sysroot, ShortPacketsAndDifferentFirmware) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/net/eth1/mtu", "9000");
  machine_.write("/sys/class/net/eth2/mtu", "1500");
  machine_.write("/sys/class/infiniband/mlx5_7/fw_ver", "28.43.1014");
  EXPECT_EQ(complaints("mtu"), "warning: mlx5_1 port 1: the MTU of eth2 is 1500");
  EXPECT_EQ(complaints("firmware"), "note: NICs differ in their firmware: 28.41.1000, 28.43.1014");
}

TEST_F(Sysroot, BridgesThatRedirect) {
  write_healthy_machine(machine_);
  std::string config(4096, '\0');
  config[0x100] = 0x0d;  // ACS, no other capability
  config[0x106] = 0x1d;
  machine_.write("/sys/bus/pci/devices/0000:11:00.0/config", config);
  std::filesystem::create_directories(machine_.path() / "sys/bus/pci/devices");
  EXPECT_EQ(complaints("acs"), "warning: ACS redirects transfers at 0000:11:00.0");
  config[0x106] = 0;
  machine_.write("/sys/bus/pci/devices/0000:11:00.0/config", config);
  EXPECT_EQ(complaints("acs"), "");
  config[0x100] = 1;
  config[0x103] = 0x10;  // the next capability is this one: a loop
  machine_.write("/sys/bus/pci/devices/0000:11:00.0/config", config);
  EXPECT_EQ(complaints("acs"), "");
}

TEST_F(Sysroot, Gib) {
  write_healthy_machine(machine_);
  variables_["NCCL_NET"] = "gIB";
  EXPECT_EQ(complaints("gib"), "error: NCCL_NET=gIB, but there is no /usr/local/gib");
  machine_.write("/usr/local/gib/lib64/libnccl.so.2.27.5", "");
  machine_.link("/usr/local/gib/lib64/libnccl.so.2", "libnccl.so.2.27.5");
  EXPECT_EQ(complaints("gib"), "error: NCCL_NET=gIB, but /usr/local/gib/lib64 has no libnccl-net*.so");
  machine_.write("/usr/local/gib/lib64/libnccl-net_internal.so", "");
  EXPECT_EQ(complaints("gib"), "warning: NCCL_NET=gIB, but LD_LIBRARY_PATH lacks /usr/local/gib/lib64");
  variables_["LD_LIBRARY_PATH"] = "/usr/local/gib/lib64";
  EXPECT_EQ(complaints("gib"), "");
  variables_["NCCL_TUNER_CONFIG_PATH"] = "/usr/local/gib/configs/tuner_config_a4.txtpb";
  EXPECT_EQ(complaints("gib"),
            "warning: NCCL_TUNER_CONFIG_PATH=/usr/local/gib/configs/tuner_config_a4.txtpb: there is no such file");
}

TEST_F(Sysroot, NetworksOfThePod) {
  write_healthy_machine(machine_);
  machine_.write("/etc/podinfo/annotations",
                 "a=\"b\"\nnetworking.gke.io/interfaces=\"[\\n "
                 "{\\\"interfaceName\\\":\\\"eth0\\\",\\\"network\\\":\\\"default\\\"},"
                 "{\\\"interfaceName\\\":\\\"gpu0rdma0\\\",\\\"network\\\":\\\"rdma-0\\\"}]\"\nbroken line");
  machine_.write("/sys/class/net/eth0/mtu", "1460");
  EXPECT_EQ(complaints("pod_networks"),
            "error: the annotation networking.gke.io/interfaces asks for interfaces that are not there: gpu0rdma0");
  machine_.write("/sys/class/net/gpu0rdma0/mtu", "8896");
  EXPECT_EQ(complaints("pod_networks"), "");
  machine_.write("/sys/class/net/gpu0rdma0/device/infiniband/mlx5_2/node_type", "1: CA");
  EXPECT_EQ(complaints("pod_networks"), "");
  for (int gid = 0; gid < 4; ++gid) {
    machine_.write(fmt::format("/sys/class/infiniband/mlx5_2/ports/1/gids/{}", gid),
                   "0000:0000:0000:0000:0000:0000:0000:0000");
  }
  EXPECT_EQ(complaints("pod_networks"),
            "error: interfaces of the annotation networking.gke.io/interfaces that have no address: gpu0rdma0");
  machine_.write("/etc/podinfo/annotations", "networking.gke.io/interfaces=\"[{,,\"");
  EXPECT_EQ(complaints("pod_networks"), "warning: the annotation networking.gke.io/interfaces names no interface");
}

TEST_F(Sysroot, RanksOfLaunchers) {
  variables_ = {
      {"RANK", "3"}, {"WORLD_SIZE", "16"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "8"}, {"MASTER_ADDR", "a"}};
  EXPECT_EQ(complaints("ranks"), "");
  variables_ = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}};
  EXPECT_EQ(complaints("ranks"), "warning: WORLD_SIZE=2 and RANK=0 without LOCAL_RANK: nodes or processes?");
  variables_ = {
      {"RANK", "2"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "16"}, {"MASTER_PORT", "0"}};
  EXPECT_EQ(complaints("ranks"),
            "error: RANK=2 is not below WORLD_SIZE=2\nwarning: WORLD_SIZE=2 beside OMPI_COMM_WORLD_SIZE=16\n"
            "warning: WORLD_SIZE=2 without MASTER_ADDR\nerror: MASTER_PORT=0 is no TCP port");
  variables_ = {{"RANK", "first"}};
  EXPECT_EQ(complaints("ranks"), "error: RANK='first' is not a number");
}

TEST_F(Sysroot, LibrariesOfAProcess) {
  Patient patient = this->patient();
  patient.pid = 42;
  machine_.write("/proc/42/maps",
                 "7f00-7f01 r-xp 00000000 08:01 1    /usr/lib/libnccl.so.2.27.5\n7f01-7f02 r--p 00000000 08:01 1    "
                 "/usr/lib/libnccl.so.2.27.5\n7f03-7f04 r-xp 00000000 08:01 2    /opt/torch/libnccl.so.2\n7f05-7f06 "
                 "rw-p 0 0 0 [heap]");
  EXPECT_EQ(found_by(check_process, patient).at(0).found,
            "process 42 has 2 copies of libnccl.so: /opt/torch/libnccl.so.2, /usr/lib/libnccl.so.2.27.5");
  patient.pid = 43;
  EXPECT_EQ(found_by(check_process, patient).at(0).found, "/proc/43/maps cannot be read");
}

TEST_F(Sysroot, QueuesAndBuffersOfManyRanks) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/infiniband/mlx5_0/device/resource",
                 "0x0000000094000000 0x0000000094003fff 0x0000000000140204");
  Patient patient = this->patient();
  patient.run.ranks = 128;
  const Findings found = found_by(check_queues, patient);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found[0].found.starts_with("mlx5_0: ")) << found[0].found;
  EXPECT_TRUE(found[0].found.ends_with("and 4 doorbell pages")) << found[0].found;
  patient.run.tokens = 1 << 20;
  EXPECT_EQ(found_by(check_memory, patient).at(0).verdict, Verdict::error);
  patient.run.tokens = 128;
  EXPECT_EQ(found_by(check_memory, patient).at(0).verdict, Verdict::ok);
}

TEST_F(Sysroot, LossesSinceTheDriverWasLoaded) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/infiniband/mlx5_3/ports/1/counters/port_rcv_packets", "100000000");
  machine_.write("/sys/class/infiniband/mlx5_3/ports/1/hw_counters/out_of_sequence", "7");
  EXPECT_EQ(complaints("losses"), "note: mlx5_3 port 1: out_of_sequence 7");
  machine_.write("/sys/class/infiniband/mlx5_3/ports/1/hw_counters/out_of_sequence", "70000");
  EXPECT_EQ(complaints("losses"), "warning: mlx5_3 port 1: out_of_sequence 70000");
}

TEST_F(Sysroot, NodesAreCompared) {
  write_healthy_machine(machine_);
  const NodeReport a{"a.json", to_json(report_machine(patient(), "1.2.3"))};
  NodeReport b = a;
  b.file = "b.json";
  b.report["host"] = "node-1";
  b.report["boot_id"] = "x";
  EXPECT_EQ(compare_nodes({a, b}).at(0).found, "2 nodes are equal");
  b.report["deep_ep"] = "1.2.4";
  b.report["kernel"] = "5.4";
  const Findings found = compare_nodes({a, b});
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].found, "deep_ep differs: 1.2.3 (a.json); 1.2.4 (b.json)");
  EXPECT_EQ(found[0].verdict, Verdict::error);
  EXPECT_EQ(found[1].verdict, Verdict::warning);
  EXPECT_EQ(compare_nodes({a, a}).at(0).found, "boot_id is 11111111-2222-3333-4444-555555555555 in a.json, a.json");
}

TEST_F(Sysroot, PausesOfTheSwitch) {
  write_healthy_machine(machine_);
  machine_.write("/ethtool/eth4",
                 "NIC statistics:\n     rx_packets: 12\n     rx_prio0_pause: 0\n     rx_prio3_pause: 40\n"
                 "     rx_prio3_pause_duration: 900\n     rx_pause_ctrl_phy: 41\n     tx_prio3_pause: 2\n"
                 "     tx_prio5_pause: 3\n     rx_discards_phy: 0\n     tx_pause_storm_error_events: 0\nbroken: line");
  EXPECT_EQ(complaints("losses"), "note: mlx5_3 port 1: pauses_received 41, paused_us 900, pauses_sent 5");
  machine_.write("/sys/class/infiniband/mlx5_3/ports/1/counters/port_rcv_packets", "1000000");
  machine_.write("/ethtool/eth4", "     rx_discards_phy: 700\n     rx_prio3_buf_discard: 650\n");
  EXPECT_EQ(complaints("losses"), "warning: mlx5_3 port 1: dropped_on_arrival 700");
  EXPECT_EQ(pauses_of({{"rx_pfc_ena_frames_pri3", 5}, {"rx_pause_frames", 0}, {"tx_pfc_ena_frames_pri12", 9}}),
            (std::map<std::string, std::uint64_t>{{"pauses_received", 5}}));
}

TEST_F(Sysroot, TheEndOfALongLog) {
  machine_.write("/log", "begin");
  const std::filesystem::path file = machine_.path() / "log";
  std::filesystem::resize_file(file, std::uintmax_t{100} << 20);  // with a hole: takes no space
  std::ofstream(file, std::ios::app) << "the end";
  EXPECT_EQ(end_of_file(file, 7), "the end");
  EXPECT_EQ(end_of_file(file, 4096).size(), 4096u);
  machine_.write("/log", "short");
  EXPECT_EQ(end_of_file(file, 4096), "short\n");
  EXPECT_EQ(end_of_file(machine_.path() / "none", 7), "");
}

TEST_F(Sysroot, ClockOfACopy) {
  write_healthy_machine(machine_);
  Findings found;
  check_clock(patient(), found);
  EXPECT_TRUE(found.empty());
  machine_.write("/run/systemd/timesync/synchronized", "");
  check_clock(patient(), found);
  EXPECT_EQ(found.at(0).verdict, Verdict::ok);
}

// --- damaged copies of machines ---

TEST_F(Sysroot, OddFilesNeitherHangNorCrashIt) {
  write_healthy_machine(machine_);
  const auto place = [&](const char* path) { return machine_.path() / std::filesystem::path(path).relative_path(); };
  const auto replace_by = [&](const char* path, const std::function<void(const std::filesystem::path&)>& make) {
    std::filesystem::remove_all(place(path));
    std::filesystem::create_directories(place(path).parent_path());
    make(place(path));
  };
  for (const char* path : {"/proc/self/limits", "/proc/self/status", "/proc/mounts", "/sys/module/nvidia/version",
                           "/etc/podinfo/annotations", "/proc/meminfo", "/etc/os-release",
                           "/proc/driver/nvidia/gpus/0000:13:00.0/information"}) {
    replace_by(path, [](const auto& file) { ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0); });
  }
  // Files without end, as far as anyone can read: only their beginning is.
  for (const char* path : {"/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0", "/proc/sys/kernel/osrelease"}) {
    replace_by(path, [](const auto& file) {
      std::ofstream(file) << std::string(1 << 20, '/');
      std::filesystem::resize_file(file, std::uintmax_t{1} << 36);
    });
  }
  replace_by("/proc/driver/nvidia/version", [](const auto& file) { std::filesystem::create_directories(file); });
  replace_by("/dev/nvidiactl", [](const auto& file) { std::filesystem::create_symlink("nvidiactl", file); });
  EXPECT_GT(findings().size(), 10u);
  EXPECT_FALSE(report().empty());
  EXPECT_FALSE(machine_text(patient()).empty());
}

TEST_F(Sysroot, TextsThatAreNoUtf8AreStillJson) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/infiniband/mlx5_0/fw_ver", "28.\xff\xfe");
  machine_.write("/etc/os-release", "PRETTY_NAME=\"\xc3\x28\x1b[31m\"");
  variables_["NCCL_NET"] = "\xff";
  const nlohmann::json json = {{"report", to_json(report_machine(patient(), "1"))},
                               {"findings", findings_json(findings())}};
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  EXPECT_FALSE(nlohmann::json::parse(text, nullptr, false).is_discarded());
  EXPECT_EQ(printable("a\x1b[31m\n"), "a?[31m\n");
}

}  // namespace
}  // namespace deep_ep::tools
