// What CUDA does for NICs: GPU memory as a dma-buf, which lets a NIC reach it without nvidia-peermem, and doorbell
// pages in a GPU's address space.
#pragma once

#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep::rdma::verbs {

/// Does a GPU see what NICs write to its memory in the order of writing (GPU_DIRECT_RDMA_WRITES_ORDERING)? SystemError
/// if CUDA does not say. Builds without CUDA: no.
bool gpu_keeps_order_of_writes(int device);

/// Exports memory of the current GPU through CUDA's driver (11.7 or later). The exporter takes any piece of one
/// allocation that begins and ends at host pages, and throws SystemError with the driver's answer. Empty in builds
/// without CUDA.
DmaBufExporter gpu_dma_buf_exporter();

/// The CUDA runtime (cudaHostRegister for I/O memory) on one GPU. Refuses everything in builds without CUDA.
PageMapper gpu_page_mapper(int device);

}  // namespace deep_ep::rdma::verbs
