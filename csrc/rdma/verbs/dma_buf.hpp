// GPU memory as a dma-buf: which lets a NIC reach it without nvidia-peermem.
#pragma once

#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep::rdma::verbs {

/// Exports memory of the current GPU through CUDA's driver (11.7 or later). The exporter takes any piece of one
/// allocation that begins and ends at host pages, and throws SystemError with the driver's answer. Empty in builds
/// without CUDA.
DmaBufExporter gpu_dma_buf_exporter();

}  // namespace deep_ep::rdma::verbs
