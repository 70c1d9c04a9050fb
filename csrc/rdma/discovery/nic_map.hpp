// Which NIC carries the traffic of which GPU.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "csrc/rdma/discovery/nics.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/support/format.hpp"
#include "csrc/topology/gpus.hpp"
#include "csrc/topology/system_root.hpp"

namespace deep_ep::rdma {

/// A NIC of a GPU, or of a rank without one: all that is needed to open it and to make queue pairs there.
struct NicAssignment {
  Nic nic;
  NicPort port;  ///< one of the NIC's
  GidEntry gid;  ///< of that port
  topology::Distance distance = {};

  std::string name() const { return fmt::format("{}:{}", nic.name, port.number); }  ///< "mlx5_2:1"
};

struct NicMapRow {
  topology::Gpu gpu;
  std::vector<NicAssignment> nics = {};  ///< several NICs, or ports, where the mapping names them
  std::string problem = {};              ///< why there is none

  /// "GPU 0 (0000:18:00.0) -> mlx5_0 port 1, 400 Gb/s, GID 3 (RoCE v2, 10.0.0.1, eth1), PIX"
  std::string text() const;
};

struct NicMap {
  std::vector<Nic> nics;
  std::vector<NicMapRow> rows;        ///< one for every GPU
  std::vector<std::string> unused;    ///< NICs that no GPU uses, with the reason: "mlx5_8: ..."
  std::vector<std::string> warnings;  ///< shared NICs, odd GIDs, variables that do not fit this machine
};

/// The mapping of the settings, if there is one; GPUs that it does not name then have no NIC. Otherwise every GPU gets
/// a NIC of its own, the nearest pairs first; where distances are equal, both are matched in the order of their PCI
/// addresses. GPUs share a NIC only if there are fewer NICs than GPUs, as evenly as possible.
///
/// Left out of the automatic choice: NICs that are not allowed, that cannot be opened, that have no active port or
/// no usable GID, that lack reliable connections, and those with less than half of the fastest one's rate (they serve
/// storage or management) unless a list of NICs allows them.
///
/// Never throws: the rows and the warnings say what is wrong, because it concerns only those who use that row.
NicMap map_gpus_to_nics(std::vector<topology::Gpu> gpus, std::vector<Nic> nics, const RdmaSettings& settings);

/// Ranks that run on the CPU, in the place of GPUs: rank i is "CUDA id" i of a mapping, and close to no NIC.
std::vector<topology::Gpu> ranks_without_gpu(int ranks);

/// The NICs, at least one, of a GPU of the map, or of the one that CUDA knows under this ordinal. SystemError, with one
/// clear text, if the machine has no RDMA device, none that can be used, or none for this GPU.
const std::vector<NicAssignment>& nics_of(const NicMap& map, std::size_t gpu);
const std::vector<NicAssignment>& nics_of_cuda_device(const NicMap& map, int ordinal);

/// Does a queue pair use only one of several paths from a rank with these NICs? So on Ethernet, and where there are
/// several NICs. No for software NICs.
bool keeps_to_path(const std::vector<NicAssignment>& nics);

/// "this machine has no RDMA device ...", or why none of its devices can be used; empty if one can.
std::string why_no_rdma(const NicMap& map);

}  // namespace deep_ep::rdma
