#include <cuda.h>
#include <cuda_runtime_api.h>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/executor/cuda/driver.hpp"
#include "csrc/rdma/verbs/gpu_access.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma::verbs {
namespace {

UniqueFd export_dma_buf(int device, void* address, std::size_t bytes) {
  int descriptor = -1;
  cuda::check(cuda::driver().mem_range_handle(&descriptor, reinterpret_cast<CUdeviceptr>(address), bytes,
                                              CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
              device, "cuMemGetHandleForAddressRange of {} at {}", format_bytes(bytes), address);
  return UniqueFd(descriptor);
}

std::shared_ptr<void> map_page(void* page, int device) {
  const cuda::Context context(device);
  const cuda::CurrentContext current(context);
  constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory;
  const cudaError_t result = cudaHostRegister(page, host_page_bytes(), kFlags);
  if (result != cudaSuccess) {
    cudaGetLastError();  // not sticky: the next caller must not find it
    const bool refused = result == cudaErrorNotPermitted || result == cudaErrorNotSupported;
    // Not OutOfMemory, which this is not about: the driver answers with it where it finds no place for I/O memory.
    fail<SystemError>("GPU {} cannot map the NIC's doorbell page: cudaHostRegister: {}{}", device,
                      cudaGetErrorString(result),
                      refused ? ". Load the NVIDIA driver with NVreg_RegistryDwords=\"PeerMappingOverride=1;\", or run "
                                "with more privileges (CAP_SYS_RAWIO, a privileged container)"
                              : "");
  }
  const std::shared_ptr<void> registered(page, [](void* gone) {
    if (cudaHostUnregister(gone) != cudaSuccess) cudaGetLastError();
  });
  void* address = nullptr;
  cuda::check(cudaHostGetDevicePointer(&address, page, 0), device, "cudaHostGetDevicePointer of a doorbell page");
  return {registered, address};
}

}  // namespace

GpuAccess gpu_access(int device) {
  int order = 0;
  cuda::check(cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, device), device,
              "cudaDeviceGetAttribute of the ordering of GPUDirect RDMA writes");
  return {order >= cudaGPUDirectRDMAWritesOrderingOwner,
          [device](void* address, std::size_t bytes) { return export_dma_buf(device, address, bytes); },
          [device](void* page) { return map_page(page, device); }};
}

}  // namespace deep_ep::rdma::verbs
