// Which NIC carries the traffic of which GPU: the rules, and the map of this machine, which is found and logged once
// per process, when it is first asked by GPU or by rank.
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
  int port = 1;  ///< one of the NIC's
  GidEntry gid;  ///< of that port
  topology::Distance distance = {};

  const NicPort& of_port() const { return *nic.port(port); }
  std::string name() const { return fmt::format("{}:{}", nic.name, port); }  ///< "mlx5_2:1"
};

struct NicMapRow {
  std::vector<NicAssignment> nics;  ///< several NICs, or ports, where the mapping names them; none: `problem` says why
  std::string problem = {};
};

struct NicMap {
  std::vector<topology::Gpu> gpus;
  std::vector<Nic> nics;
  std::vector<NicMapRow> rows;        ///< one for every GPU
  std::vector<std::string> unused;    ///< NICs that no GPU uses, with the reason: "mlx5_8: ..."
  std::vector<std::string> warnings;  ///< shared NICs, odd GIDs, variables that do not fit this machine

  /// "GPU 0 (0000:18:00.0) -> mlx5_0 port 1, 400 Gb/s, GID 3 (RoCE v2, 10.0.0.1, eth1), PIX"
  std::string line(std::size_t gpu) const;
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

/// NICs, at least one, of the GPU that CUDA knows under this ordinal. SystemError, with one clear text, if the machine
/// has no RDMA device, none that can be used, or none for this GPU; InvalidArgument for a wrong variable.
std::vector<NicAssignment> nics_of_cuda_device(int ordinal);

/// Those of one of `local_ranks` ranks that run on the CPU of this machine. Errors as above.
std::vector<NicAssignment> nics_of_host_rank(int local_rank, int local_ranks);

/// Does a queue pair use only one of several paths between two ranks? So where GPUs have NICs on Ethernet, or a mapping
/// names several NICs for one. No for software NICs, and where the wire is no NIC. Wrong variables are for others to
/// report.
bool queue_pairs_keep_to_paths(const topology::SystemRoot& root = {},
                               const environment::Source& source = environment::of_process) noexcept;

/// The same over any map, for tests.
const std::vector<NicAssignment>& nics_of(const NicMap& map, std::size_t gpu);

/// "this machine has no RDMA device ...", or why none of its devices can be used; empty if one can.
std::string why_no_rdma(const NicMap& map);

}  // namespace deep_ep::rdma
