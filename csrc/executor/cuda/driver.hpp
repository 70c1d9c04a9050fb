// The few functions of the CUDA driver that the runtime does not offer, found through the runtime: nothing links
// libcuda.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace deep_ep::cuda {

struct Driver {
  PFN_cuInit_v2000 init;
  PFN_cuGetErrorName_v6000 get_error_name;
  PFN_cuGetErrorString_v6000 get_error_string;

  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_context_retain;
  PFN_cuDevicePrimaryCtxRelease_v11000 primary_context_release;
  PFN_cuCtxGetCurrent_v4000 context_get_current;
  PFN_cuCtxPushCurrent_v4000 context_push;
  PFN_cuCtxPopCurrent_v4000 context_pop;
  PFN_cuCtxGetExecAffinity_v11040 context_affinity;

  PFN_cuMemGetAllocationGranularity_v10020 mem_get_granularity;
  PFN_cuMemCreate_v10020 mem_create;
  PFN_cuMemRelease_v10020 mem_release;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve;
  PFN_cuMemAddressFree_v10020 mem_address_free;
  PFN_cuMemMap_v10020 mem_map;
  PFN_cuMemUnmap_v10020 mem_unmap;
  PFN_cuMemSetAccess_v10020 mem_set_access;
  PFN_cuMemExportToShareableHandle_v10020 mem_export;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import;
};

/// Looked up once. Throws SystemError, naming the function, where the driver is missing or too old.
const Driver& driver();

}  // namespace deep_ep::cuda
