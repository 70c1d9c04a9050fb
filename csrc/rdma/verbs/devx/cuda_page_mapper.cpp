#include "csrc/executor/cuda/check.hpp"
#include "csrc/executor/cuda/context.hpp"
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

namespace deep_ep::rdma::verbs {
namespace {

void unmap_page(void* page) {
  if (cudaHostUnregister(page) != cudaSuccess) cudaGetLastError();
}

void* map_page(void* page, int device) {
  const cuda::Context context(device);
  const cuda::CurrentContext current(context);
  constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory;
  const cudaError_t result = cudaHostRegister(page, host_page_bytes(), kFlags);
  if (result == cudaErrorNotPermitted || result == cudaErrorNotSupported) {
    cudaGetLastError();  // not sticky: the next caller must not find it
    fail<SystemError>(
        "GPU {} may not map the NIC's doorbell page ({}). Load the NVIDIA driver with "
        "NVreg_RegistryDwords=\"PeerMappingOverride=1;\", or run with more privileges (CAP_SYS_RAWIO, a privileged "
        "container)",
        device, cudaGetErrorString(result));
  }
  if (result != cudaSuccess) {
    cudaGetLastError();
    // Not OutOfMemory, which this is not about: the driver answers with it where it finds no place for I/O memory.
    fail<SystemError>("GPU {} cannot map the NIC's doorbell page: cudaHostRegister: {}", device,
                      cudaGetErrorString(result));
  }
  void* address = nullptr;
  try {
    cuda::check(cudaHostGetDevicePointer(&address, page, 0), device, "cudaHostGetDevicePointer of a doorbell page");
  } catch (...) {
    unmap_page(page);
    throw;
  }
  return address;
}

}  // namespace

PageMapper gpu_page_mapper(int device) {
  return {[device](void* page) { return map_page(page, device); }, unmap_page};
}

}  // namespace deep_ep::rdma::verbs
