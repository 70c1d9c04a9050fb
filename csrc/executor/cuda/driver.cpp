#include "csrc/executor/cuda/driver.hpp"

#include <cuda_runtime_api.h>

#include "csrc/executor/cuda/driver_entry.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::cuda {
namespace {

template <class Function>
void find(Function& function, const char* name, unsigned version) {
  void* address = nullptr;
  const cudaError_t result = find_driver_entry(name, version, address);
  if (result != cudaSuccess) {
    cudaGetLastError();
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
  find(driver.init, "cuInit", 2000);
  find(driver.get_error_name, "cuGetErrorName", 6000);
  find(driver.get_error_string, "cuGetErrorString", 6000);
  find(driver.device_get, "cuDeviceGet", 2000);
  find(driver.device_get_attribute, "cuDeviceGetAttribute", 2000);
  find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain", 7000);
  find(driver.primary_context_release, "cuDevicePrimaryCtxRelease", 11000);
  find(driver.context_get_current, "cuCtxGetCurrent", 4000);
  find(driver.context_push, "cuCtxPushCurrent", 4000);
  find(driver.context_pop, "cuCtxPopCurrent", 4000);
  find(driver.context_affinity, "cuCtxGetExecAffinity", 11040);
  find(driver.mem_get_granularity, "cuMemGetAllocationGranularity", 10020);
  find(driver.mem_create, "cuMemCreate", 10020);
  find(driver.mem_release, "cuMemRelease", 10020);
  find(driver.mem_address_reserve, "cuMemAddressReserve", 10020);
  find(driver.mem_address_free, "cuMemAddressFree", 10020);
  find(driver.mem_map, "cuMemMap", 10020);
  find(driver.mem_unmap, "cuMemUnmap", 10020);
  find(driver.mem_set_access, "cuMemSetAccess", 10020);
  find(driver.mem_export, "cuMemExportToShareableHandle", 10020);
  find(driver.mem_import, "cuMemImportFromShareableHandle", 10020);
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
