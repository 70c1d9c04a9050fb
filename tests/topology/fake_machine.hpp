// Other machines' /sys, /proc, /dev and libraries, written into a temporary folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/topology/system_root.hpp"

namespace deep_ep::test {

struct FakeGid {
  std::string gid = "0000:0000:0000:0000:0000:0000:0000:0000";
  std::string type;  ///< empty: the kernel refuses to say
};

struct FakeNic {
  std::string name;
  std::string folder;  ///< its PCI device in sysfs ("/sys/devices/pci..."), empty for a software NIC
  std::string driver = "mlx5_core";
  std::string node_type = "1: CA";
  std::string state = "4: ACTIVE";
  std::string physical_state = "5: LinkUp";
  std::string rate = "400 Gb/sec (4X NDR)";
  std::string link_layer = "Ethernet";
  std::string uverbs = {};  ///< "uverbs0"
  bool device_file = true;
  std::string netdev = "eth1";
  std::vector<FakeGid> gids;
};

class FakeMachine {
 public:
  FakeMachine();
  ~FakeMachine();
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  topology::SystemRoot root() const { return topology::SystemRoot(path_); }
  const std::filesystem::path& path() const { return path_; }

  void write(std::string_view path, std::string_view text) const;
  void link(std::string_view path, std::string_view target) const;  ///< an absolute target means this machine's root
  void remove(std::string_view path) const;

  /// A PCI device with its folder below `parent` ("/sys/devices/pci0000:10/0000:10:01.0"); returns its own folder.
  std::string add_pci(const std::string& parent, const std::string& address, const std::string& vendor,
                      const std::string& device_class, const std::string& driver, int numa_node) const;
  /// `known_to_driver`: false for a GPU of another container, which only sysfs shows.
  void add_gpu(const std::string& parent, const std::string& address, int index, int numa_node,
               bool known_to_driver = true, const std::string& model = "NVIDIA B200") const;
  void add_nic(const FakeNic& nic) const;

 private:
  std::filesystem::path path_;
};

/// The four GIDs of a RoCE NIC: link-local v1 and v2, IPv4 v1 and v2. `address` is the last 32 bits, "0a00:0001".
std::vector<FakeGid> roce_gids(const std::string& address);

/// UUID of GPU `index` of the machines here.
std::string gpu_uuid(int index);

/// What healthy_machine() can be made to lack.
struct MachineOptions {
  std::vector<std::string> nic_names = {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"};
  bool with_gpus = true;
  bool with_nics = true;
  int pairs = 4;  ///< PCIe switches
  std::string model = "NVIDIA B200";
  bool infiniband = false;
};

/// 8 GPUs and 8 RoCE NICs of 400 Gb/s; pairs of GPUs share a PCIe switch with a pair of NICs, two pairs per NUMA node.
/// With a driver, libraries, limits and privileges that let everything work.
void write_healthy_machine(const FakeMachine& machine, const MachineOptions& options = {});

/// 8 H200 and 8 InfiniBand NICs of 400 Gb/s on a bare machine, with NVSwitches.
void write_h200_machine(const FakeMachine& machine);

/// The folder in sysfs of the PCIe switch of pair 0 to 3.
std::string switch_folder(int pair);

}  // namespace deep_ep::test
