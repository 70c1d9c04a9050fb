// The few functions of the CUDA driver that the runtime does not offer, found when they are needed: nothing links
// libcuda.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace deep_ep::cuda {

// FUNCTION(member, function, version): the version picks the signature, the one that the function had in that CUDA
// version, as in its PFN_ type's name.
#define DEEP_EP_DRIVER_FUNCTIONS(FUNCTION)                            \
  FUNCTION(device_get, cuDeviceGet, 2000)                             \
  FUNCTION(device_get_attribute, cuDeviceGetAttribute, 2000)          \
  FUNCTION(primary_context_retain, cuDevicePrimaryCtxRetain, 7000)    \
  FUNCTION(primary_context_release, cuDevicePrimaryCtxRelease, 11000) \
  FUNCTION(context_get_current, cuCtxGetCurrent, 4000)                \
  FUNCTION(context_push, cuCtxPushCurrent, 4000)                      \
  FUNCTION(context_pop, cuCtxPopCurrent, 4000)                        \
  FUNCTION(context_affinity, cuCtxGetExecAffinity, 11040)             \
  FUNCTION(mem_get_granularity, cuMemGetAllocationGranularity, 10020) \
  FUNCTION(mem_create, cuMemCreate, 10020)                            \
  FUNCTION(mem_release, cuMemRelease, 10020)                          \
  FUNCTION(mem_address_reserve, cuMemAddressReserve, 10020)           \
  FUNCTION(mem_address_free, cuMemAddressFree, 10020)                 \
  FUNCTION(mem_map, cuMemMap, 10020)                                  \
  FUNCTION(mem_unmap, cuMemUnmap, 10020)                              \
  FUNCTION(mem_set_access, cuMemSetAccess, 10020)                     \
  FUNCTION(mem_export, cuMemExportToShareableHandle, 10020)           \
  FUNCTION(mem_import, cuMemImportFromShareableHandle, 10020)         \
  FUNCTION(mem_range_handle, cuMemGetHandleForAddressRange, 11070)

struct Driver {
#define DEEP_EP_MEMBER(member, function, version) PFN_##function##_v##version member;
  DEEP_EP_DRIVER_FUNCTIONS(DEEP_EP_MEMBER)
#undef DEEP_EP_MEMBER
};

/// Looked up once, by an executor that the runtime has found its GPU for: so the driver runs. Throws SystemError,
/// naming the function, where the driver is missing or too old.
const Driver& driver();

}  // namespace deep_ep::cuda
