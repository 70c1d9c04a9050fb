// Files of a machine, PCI distances and GPUs.
#include <gtest/gtest.h>

#include "csrc/topology/gpus.hpp"
#include "csrc/topology/pci.hpp"
#include "csrc/topology/system_root.hpp"
#include "deep_ep/error.hpp"
#include "tests/topology/fake_machine.hpp"

namespace deep_ep::topology {
namespace {

TEST(SystemRoot, LinksStayInside) {
  const test::FakeMachine machine;
  machine.write("/etc/real", "inside");
  machine.link("/etc/absolute", "/etc/real");
  machine.link("/etc/relative", "../etc/real");
  machine.link("/etc/far", "../../../../../../etc/real");
  machine.link("/etc/folder", "/etc");
  machine.link("/etc/loop", "loop");
  machine.link("/etc/nowhere", "/no/such/file");
  const SystemRoot root = machine.root();
  EXPECT_FALSE(root.is_this_machine());
  for (const char* name : {"real", "absolute", "relative", "far", "folder/real", "folder/folder/absolute"}) {
    EXPECT_EQ(root.text(std::string("/etc/") + name), "inside") << name;
    EXPECT_EQ(root.resolve(std::string("/etc/") + name), "/etc/real") << name;
  }
  for (const char* name : {"loop", "nowhere", "missing", "real/below"}) {
    EXPECT_EQ(root.text(std::string("/etc/") + name), "") << name;
    EXPECT_FALSE(root.exists(std::string("/etc/") + name)) << name;
  }
  EXPECT_EQ(root.text("/etc"), "") << "a folder is not a text";
  EXPECT_TRUE(root.list("/no/such/folder").empty());
}

TEST(SystemRoot, MustBeAFolder) {
  EXPECT_THROW(SystemRoot("/no/such/folder"), InvalidArgument);
  EXPECT_TRUE(SystemRoot().is_this_machine());
  EXPECT_TRUE(SystemRoot("/").is_this_machine());
}

TEST(PciAddress, FormsOfIt) {
  EXPECT_EQ(parse_pci_address("0000:18:00.0")->text(), "0000:18:00.0");
  EXPECT_EQ(parse_pci_address("18:1f.7")->text(), "0000:18:1f.7");
  EXPECT_EQ(parse_pci_address("00000000:AF:00.0")->text(), "0000:af:00.0") << "nvidia-smi's";
  EXPECT_EQ(parse_pci_address("10000:01:00.0")->text(), "10000:01:00.0") << "VMD";
  for (const char* wrong : {"", "18", "18:00", "0000:18:00", "0000:18:20.0", "0000:18:00.8", "0000:18:00.0.0",
                            "gg:00.0", "0000:118:00.0", "pci0000:18", "0000:18:00.00", "1:2:3:4.0"}) {
    EXPECT_FALSE(parse_pci_address(wrong)) << wrong;
  }
}

// Two devices under two folders of one tree, and how far they are apart.
struct Apart {
  const char* name;
  const char* a;
  const char* b;
  int numa_a;
  int numa_b;
  Proximity proximity;
};

class PciDistance : public testing::TestWithParam<Apart> {};

TEST_P(PciDistance, IsWhatNvidiaSmiCallsIt) {
  const Apart& test = GetParam();
  const test::FakeMachine machine;
  const std::string base = "/sys/devices/";
  const std::string a = machine.add_pci(base + test.a, "0000:a0:00.0", "0x10de", "0x030200", "nvidia", test.numa_a);
  const std::string b = machine.add_pci(base + test.b, "0000:b0:00.0", "0x15b3", "0x020000", "mlx5_core", test.numa_b);
  const PciLocation near = pci_location(machine.root(), a);
  const PciLocation far = pci_location(machine.root(), b);
  EXPECT_EQ(near.address->text(), "0000:a0:00.0");
  EXPECT_EQ(distance(near, far).proximity, test.proximity) << short_name(distance(near, far).proximity);
  EXPECT_EQ(distance(far, near), distance(near, far));
}

INSTANTIATE_TEST_SUITE_P(
    Pci, PciDistance,
    testing::Values(
        Apart{"OneSwitch", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0",
              "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0", 0, 0, Proximity::same_switch},
        Apart{"FunctionsOfOneSlot", "pci0000:10/0000:10:01.0", "pci0000:10/0000:10:01.0", 0, 0, Proximity::same_switch},
        Apart{"CascadedSwitches", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0/0000:14:00.0",
              "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:15:00.0/0000:16:00.0", 0, 0,
              Proximity::across_switches},
        Apart{"RootPortsOfOneBridge", "pci0000:10/0000:10:01.0", "pci0000:10/0000:10:02.0", 0, 0,
              Proximity::host_bridge},
        Apart{"OnTheRootBus", "pci0000:00", "pci0000:00", -1, -1, Proximity::host_bridge},
        Apart{"TwoBridgesOfANode", "pci0000:10/0000:10:01.0", "pci0000:20/0000:20:01.0", 1, 1, Proximity::numa_node},
        Apart{"TwoNodes", "pci0000:10/0000:10:01.0", "pci0000:80/0000:80:01.0", 0, 1, Proximity::system},
        Apart{"NodesNotKnown", "pci0000:10/0000:10:01.0", "pci0000:80/0000:80:01.0", -1, -1, Proximity::unknown}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(Gpus, AreFoundInTheDriverAndInSysfs) {
  const test::FakeMachine machine;
  test::write_healthy_machine(machine);
  const std::vector<Gpu> gpus = find_gpus(machine.root());
  ASSERT_EQ(gpus.size(), 8u);
  for (int i = 0; i < 8; ++i) {
    const Gpu& gpu = gpus[static_cast<std::size_t>(i)];
    EXPECT_EQ(gpu.cuda_id, i);
    EXPECT_EQ(gpu.uuid, test::gpu_uuid(i));
    EXPECT_EQ(gpu.model, "NVIDIA B200");
    EXPECT_EQ(gpu.pci.numa_node, i / 4);
    EXPECT_EQ(gpu.pci.path.size(), 5u);
  }
  EXPECT_EQ(gpus[2].text(), "GPU 2 (0000:23:00.0)");
}

TEST(Gpus, OtherContainersGpusHaveNoCudaId) {
  const test::FakeMachine machine;
  machine.add_gpu("/sys/devices/pci0000:10/0000:10:01.0", "0000:11:00.0", 0, 0, false);
  machine.add_gpu("/sys/devices/pci0000:20/0000:20:01.0", "0000:21:00.0", 1, 0);
  machine.add_pci("/sys/devices/pci0000:30", "0000:30:02.0", "0x10de", "0x030000", "vfio-pci", 0);
  machine.add_pci("/sys/devices/pci0000:30", "0000:30:03.0", "0x1a03", "0x030000", "ast", 0);
  const std::vector<Gpu> gpus = find_gpus(machine.root());
  ASSERT_EQ(gpus.size(), 2u) << "neither a GPU of a virtual machine nor another maker's";
  EXPECT_FALSE(gpus[0].cuda_id);
  EXPECT_EQ(gpus[1].cuda_id, 0) << "CUDA counts what it sees";
  EXPECT_EQ(gpus[0].text(), "a GPU of another container (0000:11:00.0)");
}

}  // namespace
}  // namespace deep_ep::topology
