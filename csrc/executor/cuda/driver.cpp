#include "csrc/executor/cuda/driver.hpp"

#include <cuda_runtime_api.h>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::cuda {
namespace {

/// Through the runtime of CUDA 12.4 and later. `address` is null where the driver has no such function.
cudaError_t find_driver_entry(const char* name, unsigned version, void*& address) {
  address = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &status);
  if (result != cudaSuccess || status != cudaDriverEntryPointSuccess) address = nullptr;
#else
  // This runtime gives the newest signature that it knows; the driver's own query takes a version.
  void* query = nullptr;
  const cudaError_t result = cudaGetDriverEntryPoint("cuGetProcAddress", &query, cudaEnableDefault, &status);
  if (result == cudaSuccess && status == cudaDriverEntryPointSuccess && query != nullptr) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult asked = reinterpret_cast<PFN_cuGetProcAddress_v12000>(query)(
        name, &address, static_cast<int>(version), CU_GET_PROC_ADDRESS_DEFAULT, &found);
    if (asked != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS) address = nullptr;
  }
#endif
  return result;
}

template <class Function>
void find(Function& function, const char* name, unsigned version) {
  void* address = nullptr;
  const cudaError_t result = find_driver_entry(name, version, address);
  if (result != cudaSuccess) {
    cudaGetLastError();  // the next CUDA call must not report it
    fail<SystemError>("the CUDA driver was asked for {}: {} ({})", name, cudaGetErrorString(result),
                      cudaGetErrorName(result));
  }
  if (address == nullptr) {
    fail<SystemError>("the CUDA driver has no {} of CUDA {}.{} or later", name, version / 1000, version % 1000 / 10);
  }
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  Driver driver{};
#define DEEP_EP_FIND(member, function, version) find(driver.member, #function, version);
  DEEP_EP_DRIVER_FUNCTIONS(DEEP_EP_FIND)
#undef DEEP_EP_FIND
  // The runtime does this too, but nobody knows when.
  const CUresult ready = driver.init(0);
  if (ready != CUDA_SUCCESS)
    fail<SystemError>("the CUDA driver does not start: cuInit gives {}", static_cast<int>(ready));
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver instance = load();
  return instance;
}

}  // namespace deep_ep::cuda
