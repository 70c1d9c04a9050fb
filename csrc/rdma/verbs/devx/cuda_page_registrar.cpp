#include "csrc/executor/cuda/check.hpp"
#include "csrc/executor/cuda/context.hpp"
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

namespace deep_ep::rdma {
namespace {

class CudaPageRegistrar final : public PageRegistrar {
 public:
  explicit CudaPageRegistrar(int device) : device_(device) {}

  void* register_page(void* page) override {
    cuda::check(cudaSetDevice(device_), device_, "cudaSetDevice");
    constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory;
    const cudaError_t result = cudaHostRegister(page, kDoorbellPageBytes, kFlags);
    if (result == cudaErrorNotPermitted || result == cudaErrorNotSupported) {
      cudaGetLastError();  // not sticky: the next caller must not find it
      fail<SystemError>(
          "GPU {} may not map the NIC's doorbell page ({}). Load the NVIDIA driver with "
          "NVreg_RegistryDwords=\"PeerMappingOverride=1;\", or run with more privileges (CAP_SYS_RAWIO, a privileged "
          "container)",
          device_, cudaGetErrorString(result));
    }
    cuda::check(result, device_, "cudaHostRegister of a doorbell page");
    void* address = nullptr;
    try {
      cuda::check(cudaHostGetDevicePointer(&address, page, 0), device_, "cudaHostGetDevicePointer of a doorbell page");
    } catch (...) {
      unregister_page(page);
      throw;
    }
    return address;
  }

  void unregister_page(void* page) noexcept override {
    if (cudaHostUnregister(page) != cudaSuccess) cudaGetLastError();
  }

 private:
  int device_;
};

}  // namespace

std::unique_ptr<PageRegistrar> make_cuda_page_registrar(int device) {
  return std::make_unique<CudaPageRegistrar>(device);
}

}  // namespace deep_ep::rdma
