// A NIC's data-direct function: a second PCIe function, beside the GPU, by which the NIC reaches GPU memory where its
// own is behind the CPU. Needs rdma-core 54 and CUDA 12.8.
#pragma once

#include <optional>

#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep::rdma::verbs {

struct Mlx5Functions;

/// Nothing where the NIC has no such function, or libmlx5 knows none. `over_pcie` exports memory of a GPU as that
/// function sees it. `functions` must outlive the result.
std::optional<DataDirect> find_data_direct(const Device& device, const Mlx5Functions& functions,
                                           const DmaBufExporter& over_pcie);

}  // namespace deep_ep::rdma::verbs
