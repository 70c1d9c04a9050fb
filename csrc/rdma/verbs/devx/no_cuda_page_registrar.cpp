// What stands in for cuda_page_registrar.cpp in a build without CUDA.
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

std::unique_ptr<PageRegistrar> make_cuda_page_registrar(int device) {
  fail<SystemError>("GPU {} cannot map a NIC's doorbell page: this build of the library has no CUDA", device);
}

}  // namespace deep_ep::rdma
