#include "csrc/rdma/verbs/data_direct.hpp"

#include <array>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma::verbs {

std::optional<DataDirect> find_data_direct(const Device& device, const Mlx5Functions& functions,
                                           const DmaBufExporter& over_pcie) {
  if (!over_pcie || functions.reg_dmabuf_mr == nullptr || functions.get_data_direct_sysfs_path == nullptr) return {};
  std::array<char, 512> path{};
  if (functions.get_data_direct_sysfs_path(device.context(), path.data(), path.size()) != 0) return {};
  log::info("RDMA device {}: has a data-direct function, {}", device.name(), path.data());
  return DataDirect{&functions, over_pcie};
}

}  // namespace deep_ep::rdma::verbs
