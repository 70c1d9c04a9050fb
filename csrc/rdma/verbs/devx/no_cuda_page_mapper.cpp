// Stands in for cuda_page_mapper.cpp in builds without CUDA.
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {

PageMapper gpu_page_mapper(int device) {
  return {[device](void*) -> void* {
            fail<SystemError>("GPU {} cannot map a NIC's doorbell page: this build of the library has no CUDA", device);
          },
          [](void*) {}};
}

}  // namespace deep_ep::rdma::verbs
