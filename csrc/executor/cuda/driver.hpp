// The few functions of the CUDA driver that the runtime does not offer, found through the runtime: nothing links
// libcuda.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace deep_ep::cuda {

// NEED(member, function, version): the version picks the signature, the one that the function had in that CUDA version,
// as in its PFN_ type's name. MAY: null where the driver has no such function, or cannot be asked.
#define DEEP_EP_DRIVER_FUNCTIONS(NEED, MAY)                       \
  NEED(init, cuInit, 2000)                                        \
  NEED(get_error_name, cuGetErrorName, 6000)                      \
  NEED(get_error_string, cuGetErrorString, 6000)                  \
  NEED(device_get, cuDeviceGet, 2000)                             \
  NEED(device_get_attribute, cuDeviceGetAttribute, 2000)          \
  NEED(primary_context_retain, cuDevicePrimaryCtxRetain, 7000)    \
  NEED(primary_context_release, cuDevicePrimaryCtxRelease, 11000) \
  NEED(context_get_current, cuCtxGetCurrent, 4000)                \
  NEED(context_push, cuCtxPushCurrent, 4000)                      \
  NEED(context_pop, cuCtxPopCurrent, 4000)                        \
  NEED(context_affinity, cuCtxGetExecAffinity, 11040)             \
  NEED(mem_get_granularity, cuMemGetAllocationGranularity, 10020) \
  NEED(mem_create, cuMemCreate, 10020)                            \
  NEED(mem_release, cuMemRelease, 10020)                          \
  NEED(mem_address_reserve, cuMemAddressReserve, 10020)           \
  NEED(mem_address_free, cuMemAddressFree, 10020)                 \
  NEED(mem_map, cuMemMap, 10020)                                  \
  NEED(mem_unmap, cuMemUnmap, 10020)                              \
  NEED(mem_set_access, cuMemSetAccess, 10020)                     \
  NEED(mem_export, cuMemExportToShareableHandle, 10020)           \
  NEED(mem_retain, cuMemRetainAllocationHandle, 11000)            \
  NEED(mem_import, cuMemImportFromShareableHandle, 10020)         \
  MAY(mem_range_handle, cuMemGetHandleForAddressRange, 11070)

struct Driver {
#define DEEP_EP_MEMBER(member, function, version) PFN_##function##_v##version member;
  DEEP_EP_DRIVER_FUNCTIONS(DEEP_EP_MEMBER, DEEP_EP_MEMBER)
#undef DEEP_EP_MEMBER
};

/// Looked up once. Throws SystemError, naming the function, where the driver is missing or too old.
const Driver& driver();

}  // namespace deep_ep::cuda
