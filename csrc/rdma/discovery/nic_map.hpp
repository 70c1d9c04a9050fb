// Which NIC carries the traffic of which GPU.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/discovery/nics.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/topology/gpus.hpp"

namespace deep_ep::rdma {

/// A port that the library can use, with the GID it would use there.
struct UsablePort {
  std::size_t nic = 0;  ///< position in NicMap::nics
  int port = 1;
  GidEntry gid;
};

struct NicMapRow {
  std::optional<UsablePort> port;  ///< nothing: `problem` says why
  topology::Distance distance;
  bool from_mapping = false;  ///< DEEP_EP_DEVICE_TO_HCA_MAPPING named it
  std::string problem;
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
/// a NIC of its own, such that the sum of the distances is smallest; where distances are equal, both are matched in the
/// order of their PCI addresses. GPUs share a NIC only if there are fewer NICs than GPUs, as evenly as possible.
///
/// Left out of the automatic choice: NICs that are not allowed, that cannot be opened, that have no active port or
/// no usable GID, that lack reliable connections, and those with less than half of the fastest one's rate (they serve
/// storage or management) unless a list of NICs allows them.
///
/// Never throws: the rows and the warnings say what is wrong, because it concerns only those who use that row.
NicMap map_gpus_to_nics(std::vector<topology::Gpu> gpus, std::vector<Nic> nics, const RdmaSettings& settings);

/// Ranks that run on the CPU, in the place of GPUs: rank i is "CUDA id" i of a mapping, and close to no NIC.
std::vector<topology::Gpu> ranks_without_gpu(int ranks);

}  // namespace deep_ep::rdma
