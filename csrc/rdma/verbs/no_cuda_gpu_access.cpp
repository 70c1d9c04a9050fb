#include "csrc/rdma/verbs/gpu_access.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {

bool gpu_keeps_order_of_writes(int) { return false; }

DmaBufExporter gpu_dma_buf_exporter(int) { return {}; }

PageMapper gpu_page_mapper(int device) {
  return [device](void*) -> std::shared_ptr<void> {
    fail<SystemError>("GPU {} cannot map a NIC's doorbell page: this build of the library has no CUDA", device);
  };
}

}  // namespace deep_ep::rdma::verbs
