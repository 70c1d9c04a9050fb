// What the operator set for RDMA: the library's own variables, and those that NVSHMEM's and NCCL's users have already.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/rdma/discovery/device_mapping.hpp"
#include "csrc/rdma/discovery/gid.hpp"
#include "csrc/topology/pci.hpp"

namespace deep_ep::rdma {

/// The value of an environment variable; nothing where it is not set or empty.
using Environment = std::function<std::optional<std::string>(std::string_view name)>;

/// The variables of this process.
std::optional<std::string> process_environment(std::string_view name);

struct RdmaSettings {
  std::vector<MappingEntry> mapping;  ///< DEEP_EP_DEVICE_TO_HCA_MAPPING
  NicFilter nics;                     ///< DEEP_EP_HCA_LIST, else NVSHMEM_HCA_LIST, else NCCL_IB_HCA
  GidPolicy gid;                      ///< DEEP_EP_RDMA_GID_INDEX, else NVSHMEM_IB_GID_INDEX, else NCCL_IB_GID_INDEX
  std::string nic_handler;            ///< "gpu", "cpu" or "auto": DEEP_EP_NIC_HANDLER, else NVSHMEM_IBGDA_NIC_HANDLER
  std::string wire;                   ///< "local", "verbs" or "auto": DEEP_EP_RDMA_WIRE
  bool dma_buf = true;                ///< off: NVSHMEM_IB_DISABLE_DMABUF=1 or NCCL_DMABUF_ENABLE=0
  /// A GPU whose NIC is farther away than this is warned of: NCCL_NET_GDR_LEVEL.
  std::optional<topology::Proximity> gpu_direct_limit;
  // Of other libraries only; the library's own variables for these win and have their defaults (queue pairs).
  std::optional<int> traffic_class;   ///< NVSHMEM_IB_TRAFFIC_CLASS, else NCCL_IB_TC; Ethernet only
  std::optional<int> service_level;   ///< EP_OVERRIDE_RDMA_SL, else NVSHMEM_IB_SL, else NCCL_IB_SL
  std::optional<int> ack_timeout;     ///< NCCL_IB_TIMEOUT
  std::optional<int> retry_count;     ///< NCCL_IB_RETRY_CNT
  std::optional<int> pkey_index;      ///< NCCL_IB_PKEY
  std::vector<std::string> taken;     ///< "NCCL_IB_TC=52": variables of others that are in effect
  std::vector<std::string> warnings;  ///< variables of others that are not understood, and so are ignored
};

/// A wrong value of a variable of the library's own is InvalidArgument; one of another library's is a warning, because
/// that library may accept it.
RdmaSettings read_settings(const Environment& environment = process_environment);

}  // namespace deep_ep::rdma
