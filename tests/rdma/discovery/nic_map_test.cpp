// Which NIC each GPU gets, on machines of all kinds.
#include "csrc/rdma/discovery/nic_map.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/variables.hpp"
#include "tests/topology/fake_machine.hpp"

namespace deep_ep::rdma {
namespace {

using test::message_of;

NicMap map_of(const test::FakeMachine& machine, const Variables& variables = {}) {
  return map_gpus_to_nics(topology::find_gpus(machine.root()), find_nics(machine.root()),
                          read_settings(source_of(variables)));
}

std::vector<std::string> names_of(const NicMap& map) {
  std::vector<std::string> names;
  for (const NicMapRow& row : map.rows) names.push_back(row.nics.empty() ? "" : row.nics[0].nic.name);
  return names;
}

const std::vector<std::string> kOneToOne = {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3",
                                            "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"};

class NicMapTest : public testing::Test {
 protected:
  void write(const test::MachineOptions& options = {}) { test::write_healthy_machine(machine_, options); }
  /// A NIC on a slot of its own, not near any GPU.
  test::FakeNic extra(const std::string& name, const std::string& rate) const {
    test::FakeNic nic;
    nic.name = name;
    nic.folder =
        machine_.add_pci("/sys/devices/pci0000:05/0000:05:01.0", "0000:06:00.0", "0x15b3", "0x020000", "mlx5_core", 0);
    nic.rate = rate;
    nic.uverbs = "uverbs30";
    nic.gids = test::roce_gids("0a63:0001");
    return nic;
  }
  test::FakeMachine machine_;
};

TEST_F(NicMapTest, EveryGpuOfTheSeedsMachineGetsItsOwnNicWithoutAnyVariable) {
  write();
  const NicMap map = map_of(machine_);
  EXPECT_EQ(names_of(map), kOneToOne);
  for (std::size_t gpu = 0; gpu < 8; ++gpu) {
    EXPECT_EQ(map.rows[gpu].nics.at(0).distance.proximity, topology::Proximity::same_switch);
    EXPECT_EQ(map.rows[gpu].nics.at(0).gid.index, 3);
  }
  EXPECT_TRUE(map.warnings.empty());
  EXPECT_TRUE(map.unused.empty());
  EXPECT_EQ(map.rows[2].text(),
            "GPU 2 (0000:23:00.0) -> mlx5_2 port 1, 400 Gb/s, GID 3 (RoCE v2, 10.0.2.1, eth3), PIX");
}

TEST_F(NicMapTest, PortsHaveTheAdministratorsTrafficClassAndNicsTheirCpus) {
  write();
  const auto set = [&](const std::string& nic, std::string_view text) {
    const auto folder = machine_.root().resolve("/sys/class/infiniband/" + nic);
    machine_.write(folder.value() + "/tc/1/traffic_class", text);
  };
  set("mlx5_0", "Global tclass=106\ntclass=3,src_ip=10.0.0.1\n");
  set("mlx5_1", "52\n");
  const std::vector<Nic> nics = find_nics(machine_.root());
  EXPECT_EQ(nics[0].ports[0].traffic_class, 106);
  EXPECT_EQ(nics[1].ports[0].traffic_class, 52);
  EXPECT_EQ(nics[2].ports[0].traffic_class, std::nullopt);
  EXPECT_TRUE(nics[0].cpus.empty()) << "this machine has no list of them";
  machine_.write(fmt::format("/sys/devices/system/node/node{}/cpulist", nics[0].pci.numa_node), "0-2,8,10-11\n");
  EXPECT_EQ(find_nics(machine_.root())[0].cpus, (std::vector<int>{0, 1, 2, 8, 10, 11}));
  const NicAssignment assigned = nics_of(map_of(machine_), 0).front();
  EXPECT_EQ(assigned.port.traffic_class, 106);
  EXPECT_EQ(assigned.nic.cpus.size(), 6u);
  EXPECT_EQ(assigned.nic.pci.numa_node, nics[0].pci.numa_node);
}

TEST_F(NicMapTest, NetworksThatKeepAConnectionOnOnePath) {
  EXPECT_FALSE(keeps_to_path({}));
  write();
  EXPECT_TRUE(keeps_to_path(nics_of(map_of(machine_), 0)));
  const test::FakeMachine infiniband;
  test::write_h200_machine(infiniband);
  EXPECT_FALSE(keeps_to_path(nics_of(map_of(infiniband), 0)));
}

TEST_F(NicMapTest, APortThatIsDownLeavesItsNicOut) {
  write();
  machine_.write("/sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN");
  machine_.write("/sys/class/infiniband/mlx5_3/ports/1/phys_state", "3: Disabled");
  const NicMap map = map_of(machine_);
  const std::vector<std::string> names = names_of(map);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), 7u) << "seven NICs for eight GPUs";
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).count("mlx5_3"), 0u);
  EXPECT_EQ(map.unused, std::vector<std::string>{"mlx5_3: port 1 is DOWN (link: Disabled)"});
  ASSERT_EQ(map.warnings.size(), 1u);
  EXPECT_EQ(
      map.warnings[0],
      "mlx5_2 port 1 carries the traffic of 2 GPUs, each gets a share of its bandwidth: GPU 2 (0000:23:00.0), GPU "
      "3 (0000:24:00.0)");
}

TEST_F(NicMapTest, ASlowNicIsForStorage) {
  write();
  machine_.add_nic(extra("mlx5_8", "100 Gb/sec (2X HDR)"));
  NicMap map = map_of(machine_);
  EXPECT_EQ(names_of(map), kOneToOne);
  EXPECT_EQ(map.unused, std::vector<std::string>{"mlx5_8: 100 Gb/s where others have 400 Gb/s: taken for a storage or "
                                                 "management NIC; DEEP_EP_HCA_LIST may name it"});
  map = map_of(machine_, {{"DEEP_EP_HCA_LIST", "mlx5_8"}});
  EXPECT_EQ(names_of(map), std::vector<std::string>(8, "mlx5_8"));
  EXPECT_EQ(map.unused[0], "mlx5_0: DEEP_EP_HCA_LIST=mlx5_8 does not allow it");
}

TEST_F(NicMapTest, CardsComeBeforeSecondPortsOfCards) {
  // GPU 0 and 1 below one switch, with a card of two ports (two functions) and a card of one.
  const std::string hub = test::switch_folder(0);
  machine_.add_gpu(hub + "/0000:12:00.0", "0000:13:00.0", 0, 0);
  machine_.add_gpu(hub + "/0000:12:01.0", "0000:14:00.0", 1, 0);
  int number = 0;
  for (const char* address : {"0000:15:00.0", "0000:15:00.1", "0000:16:00.0"}) {
    test::FakeNic nic;
    nic.name = fmt::format("nic{}", number);
    nic.folder = machine_.add_pci(fmt::format("{}/0000:12:{:02x}.0", hub, number < 2 ? 2 : 3), address, "0x15b3",
                                  "0x020000", "mlx5_core", 0);
    nic.uverbs = fmt::format("uverbs{}", number++);
    nic.gids = test::roce_gids("0a00:0001");
    machine_.add_nic(nic);
  }
  EXPECT_EQ(names_of(map_of(machine_)), (std::vector<std::string>{"nic0", "nic2"}));
}

TEST_F(NicMapTest, ContainersThatShareAMachineComeToTheSameMap) {
  write();
  // This container sees GPU 1 only, and all NICs.
  for (const int bus : {0x13, 0x23, 0x24, 0x33, 0x34, 0x43, 0x44}) {
    machine_.remove(fmt::format("/proc/driver/nvidia/gpus/0000:{:02x}:00.0", bus));
  }
  const NicMap map = map_of(machine_);
  EXPECT_EQ(names_of(map), kOneToOne);
  EXPECT_EQ(map.rows[1].gpu.cuda_id, 0);
  EXPECT_FALSE(map.rows[0].gpu.cuda_id);
}

TEST_F(NicMapTest, AContainerHasTheNicsItWasGivenForItself) {
  write();
  // GPUs 4 and 5, device files of NICs 4 and 5.
  for (const int bus : {0x13, 0x14, 0x23, 0x24, 0x43, 0x44}) {
    machine_.remove(fmt::format("/proc/driver/nvidia/gpus/0000:{:02x}:00.0", bus));
  }
  for (const int nic : {0, 1, 2, 3, 6, 7}) machine_.remove(fmt::format("/dev/infiniband/uverbs{}", nic));
  const NicMap map = map_of(machine_);
  EXPECT_EQ(names_of(map), (std::vector<std::string>{"", "", "", "", "mlx5_4", "mlx5_5", "", ""}));
  EXPECT_EQ(map.rows[0].problem, "it belongs to another container");
  EXPECT_EQ(map.unused[0], "mlx5_0: /dev/infiniband/uverbs0 cannot be opened");
}

TEST_F(NicMapTest, AMachineWithoutRdmaGivesOneClearError) {
  write({.with_nics = false});
  const NicMap map = map_of(machine_);
  EXPECT_EQ(map.rows[0].text(), "GPU 0 (0000:13:00.0) -> no NIC: there is no usable NIC");
  EXPECT_EQ(message_of<SystemError>([&] { nics_of(map, 0); }),
            "RDMA was asked for, but this machine has no RDMA device (/sys/class/infiniband is empty or missing): "
            "load the driver of its NIC, or give the container its devices. `deep_ep doctor` says more");
}

TEST_F(NicMapTest, RanksOnTheCpuTakeTurns) {
  write({.with_gpus = false});
  EXPECT_TRUE(map_of(machine_).rows.empty());
  const auto map = [&](int ranks, const Variables& variables) {
    return map_gpus_to_nics(ranks_without_gpu(ranks), find_nics(machine_.root()), read_settings(source_of(variables)));
  };
  EXPECT_EQ(names_of(map(3, {})), (std::vector<std::string>{"mlx5_0", "mlx5_1", "mlx5_2"}));
  EXPECT_EQ(names_of(map(2, {{"DEEP_EP_DEVICE_TO_HCA_MAPPING", "0:mlx5_5,1:mlx5_1"}})),
            (std::vector<std::string>{"mlx5_5", "mlx5_1"}));
  EXPECT_EQ(map(1, {}).rows[0].text(), "rank 0 -> mlx5_0 port 1, 400 Gb/s, GID 3 (RoCE v2, 10.0.0.1, eth1), -");
}

TEST_F(NicMapTest, SoftwareNicsCountAsNicsAndIwarpDoesNot) {
  test::FakeNic rxe;
  rxe.name = "rxe0";
  rxe.uverbs = "uverbs0";
  rxe.rate = "2.5 Gb/sec (1X SDR)";
  rxe.gids = {{"fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2"},
              {"0000:0000:0000:0000:0000:ffff:c0a8:0001", "RoCE v2"}};
  machine_.add_nic(rxe);
  test::FakeNic iwarp = rxe;
  iwarp.name = "irdma0";
  iwarp.node_type = "4: RNIC";
  iwarp.uverbs = "uverbs1";
  machine_.add_nic(iwarp);
  const auto nics = find_nics(machine_.root());
  ASSERT_EQ(nics.size(), 2u);
  EXPECT_EQ(nics[1].driver, "rdma_rxe");
  EXPECT_EQ(nics[1].capability, Capability::verbs);
  EXPECT_EQ(nics[0].capability, Capability::unsupported);
  const NicMap map = map_gpus_to_nics(ranks_without_gpu(2), nics, {});
  EXPECT_EQ(names_of(map), (std::vector<std::string>{"rxe0", "rxe0"}));
  EXPECT_FALSE(keeps_to_path(map.rows[0].nics)) << "on Ethernet, but there is no more than one path";
  EXPECT_EQ(map.unused,
            std::vector<std::string>{"irdma0: not supported: no reliable connections over InfiniBand or RoCE"});
}

// --- DEEP_EP_DEVICE_TO_HCA_MAPPING against the machine ---

struct Mapped {
  const char* name;
  const char* mapping;
  std::size_t gpu;
  const char* nic;      ///< empty: it has none
  const char* problem;  ///< of that GPU
};

class MappingOnAMachine : public testing::TestWithParam<Mapped> {};

TEST_P(MappingOnAMachine, IsApplied) {
  const test::FakeMachine machine;
  test::write_healthy_machine(machine);
  machine.write("/sys/class/infiniband/mlx5_7/ports/1/state", "1: DOWN");
  machine.write("/sys/class/infiniband/mlx5_7/ports/1/phys_state", "2: Polling");
  const Mapped& test = GetParam();
  const NicMap map = map_of(machine, {{"DEEP_EP_DEVICE_TO_HCA_MAPPING", test.mapping}});
  EXPECT_EQ(names_of(map)[test.gpu], test.nic);
  EXPECT_EQ(map.rows[test.gpu].problem, test.problem);
}

constexpr const char* kVariable = "DEEP_EP_DEVICE_TO_HCA_MAPPING";

INSTANTIATE_TEST_SUITE_P(
    Mapping, MappingOnAMachine,
    testing::Values(
        Mapped{"OfTheSeeds", "0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1,4:mlx5_4:1,5:mlx5_5:1,6:mlx5_6:1,7:mlx5_6:1",
               5, "mlx5_5", ""},
        Mapped{"WinsOverDistance", "0:mlx5_6,1:mlx5_5", 0, "mlx5_6", ""},
        Mapped{"ByBeginningOfUuid", "GPU-A0000004 : mlx5_1", 4, "mlx5_1", ""},
        Mapped{"AGpuThatIsNotNamed", "0:mlx5_0", 1, "", "DEEP_EP_DEVICE_TO_HCA_MAPPING does not name it"},
        Mapped{"AnUnknownHca", "0:mlx5_9", 0, "",
               "DEEP_EP_DEVICE_TO_HCA_MAPPING: '0:mlx5_9': there is no HCA 'mlx5_9'; HCAs of this machine: mlx5_0, "
               "mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7"},
        Mapped{"AnUnknownPort", "0:mlx5_0:2", 0, "",
               "DEEP_EP_DEVICE_TO_HCA_MAPPING: '0:mlx5_0:2': mlx5_0 has no port 2"},
        Mapped{"APortThatIsDown", "0:mlx5_7", 0, "",
               "DEEP_EP_DEVICE_TO_HCA_MAPPING: '0:mlx5_7': port 1 is DOWN (link: Polling)"},
        Mapped{"OneComesTwice", "0:mlx5_0,GPU-a0000000:mlx5_0:1", 0, "",
               "DEEP_EP_DEVICE_TO_HCA_MAPPING: 'GPU-a0000000:mlx5_0:1': the GPU has this NIC already"},
        Mapped{"OneOfTwoIsUnknown", "4:mlx5_4,GPU-a0000004:mlx5_9", 4, "",
               "DEEP_EP_DEVICE_TO_HCA_MAPPING: 'GPU-a0000004:mlx5_9': there is no HCA 'mlx5_9'; HCAs of this machine: "
               "mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_F(NicMapTest, AGpuMayHaveSeveralNics) {
  write();
  const NicMap map = map_of(machine_, {{kVariable, "0:mlx5_0,1:mlx5_2,GPU-a0000000:mlx5_1"}});
  ASSERT_EQ(nics_of(map, 0).size(), 2u);
  EXPECT_EQ(nics_of(map, 0)[0].name(), "mlx5_0:1");
  EXPECT_EQ(nics_of(map, 0)[1].name(), "mlx5_1:1");
  EXPECT_TRUE(map.rows[0].text().ends_with(", and mlx5_1 port 1")) << map.rows[0].text();
  EXPECT_TRUE(map.unused[0].starts_with("mlx5_3: "));
  EXPECT_EQ(nics_of(map, 1).size(), 1u);
  const test::FakeMachine infiniband;
  test::write_h200_machine(infiniband);
  EXPECT_TRUE(keeps_to_path(nics_of(map_of(infiniband, {{kVariable, "0:mlx5_0,0:mlx5_1"}}), 0)))
      << "one queue pair would use one of them";
}

TEST_F(NicMapTest, AMappingThatSharesANicIsWarnedOf) {
  write();
  const NicMap map = map_of(machine_, {{kVariable, "0:mlx5_0,1:mlx5_0,9:mlx5_1,GPU-ff:mlx5_2"}});
  EXPECT_EQ(map.warnings, (std::vector<std::string>{
                              "DEEP_EP_DEVICE_TO_HCA_MAPPING: '9:mlx5_1' names no GPU of this machine",
                              "DEEP_EP_DEVICE_TO_HCA_MAPPING: 'GPU-ff:mlx5_2' names no GPU of this machine",
                              "mlx5_0 port 1 carries the traffic of 2 GPUs, each gets a share of its bandwidth: GPU 0 "
                              "(0000:13:00.0), GPU 1 (0000:14:00.0)"}));
  EXPECT_EQ(map.unused[0], "mlx5_1: DEEP_EP_DEVICE_TO_HCA_MAPPING does not name it");
  EXPECT_EQ(message_of<SystemError>([&] { nics_of(map, 2); }),
            "RDMA was asked for, but GPU 2 (0000:23:00.0) has no NIC: DEEP_EP_DEVICE_TO_HCA_MAPPING does not name "
            "it. `deep_ep doctor` says more");
}

TEST_F(NicMapTest, AFarNicIsWarnedOf) {
  write();
  const NicMap far = map_of(machine_, {{kVariable, "0:mlx5_7"}});
  EXPECT_EQ(far.warnings, std::vector<std::string>{"GPU 0 (0000:13:00.0) and mlx5_7 are SYS apart (across NUMA nodes): "
                                                   "expect a fraction of the NIC's bandwidth"});
}

}  // namespace
}  // namespace deep_ep::rdma
