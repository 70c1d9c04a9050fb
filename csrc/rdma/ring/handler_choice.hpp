// Which NIC handler serves the rings of this process.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "csrc/rdma/ring/nic_handler.hpp"

namespace deep_ep::rdma {

/// `wanted` is RdmaSettings::nic_handler (DEEP_EP_NIC_HANDLER): "auto" takes `gpu` where kernels can ring the device,
/// otherwise `cpu`, with one warning that says why. "gpu" and "cpu" are taken at their word; "gpu" where it is
/// impossible is a SystemError, another word InvalidArgument.
///
/// why_not_gpu: tries it out and returns "" or the reason (why_kernels_cannot_ring(), or that the device is none of
/// mlx5); not called for "cpu".
NicHandlerKind choose_nic_handler(std::string_view wanted, const std::function<std::string()>& why_not_gpu);

}  // namespace deep_ep::rdma
