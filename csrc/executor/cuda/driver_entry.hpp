// Functions of the CUDA driver by name and version, found through the runtime of CUDA 12.4 and later.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace deep_ep::cuda {

/// `version` picks the signature: the one that the function had in that CUDA version, as in its PFN_ type's name.
/// `address` is null where the driver has no such function, or cannot be asked.
inline cudaError_t find_driver_entry(const char* name, unsigned version, void*& address) {
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

}  // namespace deep_ep::cuda
