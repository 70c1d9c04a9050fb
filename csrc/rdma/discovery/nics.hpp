// The RDMA devices of a machine as the kernel shows them in sysfs: no RDMA library needed, no name expected.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/discovery/gid.hpp"
#include "csrc/topology/pci.hpp"
#include "csrc/topology/system_root.hpp"

namespace deep_ep::rdma {

struct NicPort {
  int number = 1;
  std::string state = {};           ///< "ACTIVE", "DOWN", "INIT", ...
  std::string physical_state = {};  ///< "LinkUp", "Disabled", "Polling", ...
  double rate_gbps = 0;             ///< bits; 0: the kernel does not say
  std::string link_layer = {};      ///< "Ethernet" or "InfiniBand"
  std::vector<GidEntry> gids = {};  ///< those that are not zero
  /// RoCE: what the administrator set for all connections, where NVIDIA's driver has such a setting. Queue pairs made
  /// by DevX do not get it by themselves.
  std::optional<std::uint8_t> traffic_class = {};

  bool active() const { return state == "ACTIVE"; }
  bool ethernet() const { return link_layer == "Ethernet"; }
};

/// What the library can do with a device, from its kernel driver and kind, never from its name.
enum class Capability : std::uint8_t {
  mlx5,         ///< GPUs may write its queues and ring its doorbell; the `cpu` handler works as well
  verbs,        ///< reliable connections through verbs: the `cpu` NIC handler
  unsupported,  ///< no reliable connections over InfiniBand or RoCE (iWARP, EFA, usNIC)
};

struct Nic {
  std::string name = {};       ///< "mlx5_0", or whatever udev made of it
  std::string driver = {};     ///< kernel driver: "mlx5_core", "bnxt_en", "rdma_rxe"; empty if unknown
  std::string node_type = {};  ///< "CA", "RNIC", "usNIC UDP", "Unspecified"
  std::string firmware = {};
  std::string uverbs = {};  ///< "uverbs0", the character device in /dev/infiniband; empty if there is none
  bool accessible = false;  ///< this process may open that
  bool virtual_function = false;
  std::vector<int> cpus = {};      ///< those of its NUMA node; empty if unknown
  topology::PciLocation pci = {};  ///< without an address for software NICs
  std::vector<NicPort> ports = {};
  Capability capability = Capability::unsupported;
};

/// All devices in /sys/class/infiniband, by PCI address; those that are not on PCI follow, by name.
std::vector<Nic> find_nics(const topology::SystemRoot& root);

/// Does the processor say that a hypervisor runs this machine?
bool is_virtual_machine(const topology::SystemRoot& root);

const char* name_of(Capability capability);

}  // namespace deep_ep::rdma
