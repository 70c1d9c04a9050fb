// RDMA on this machine, for the rest of the library: found and logged once per process, asked for by GPU or by rank.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/topology/system_root.hpp"

namespace deep_ep::rdma {

/// All that is needed to open the NIC and to make queue pairs there.
struct NicAssignment {
  std::string nic;  ///< "mlx5_0"
  int port = 1;
  int gid_index = 0;
  GidBytes gid{};
  bool ethernet = true;
  double rate_gbps = 0;
  Capability capability = Capability::verbs;
  topology::Distance distance = {};
  std::optional<std::uint8_t> traffic_class;  ///< see NicPort
  std::vector<int> cpus = {};                 ///< see Nic
  int numa_node = -1;                         ///< -1: not known
};

/// The map of this machine and environment; worked out and logged at the first call. A wrong variable: InvalidArgument.
const NicMap& machine_nic_map();

/// NIC of the GPU that CUDA knows under this ordinal. SystemError, with one clear text, if the machine has no RDMA
/// device, none that can be used, or none for this GPU.
NicAssignment nic_of_cuda_device(int ordinal);

/// NIC of one of `local_ranks` ranks that run on the CPU of this machine. Errors as above.
NicAssignment nic_of_host_rank(int local_rank, int local_ranks);

/// Does RDMA of this machine go by NICs of its own on Ethernet? No for software NICs, and where the wire is no NIC.
/// Wrong variables are for others to report.
bool nics_are_on_ethernet(const topology::SystemRoot& root = {},
                          const environment::Source& source = environment::of_process) noexcept;

/// The same over any map, for tests.
NicAssignment assignment_of(const NicMap& map, std::size_t gpu);

/// "this machine has no RDMA device ...", or why none of its devices can be used; empty if one can.
std::string why_no_rdma(const NicMap& map);

}  // namespace deep_ep::rdma
