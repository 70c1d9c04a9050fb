#include "csrc/executor/cuda/driver.hpp"

#include <dlfcn.h>

#include "csrc/support/format.hpp"

namespace deep_ep::cuda {
namespace {

template <class Function>
Function find(const char* name, unsigned version) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);  // the same one each time
  void* const query = library == nullptr ? nullptr : ::dlsym(library, "cuGetProcAddress_v2");
  if (query == nullptr) fail<SystemError>("the CUDA driver was asked for {}: {}", name, ::dlerror());
  void* address = nullptr;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const CUresult asked = reinterpret_cast<PFN_cuGetProcAddress_v12000>(query)(name, &address, static_cast<int>(version),
                                                                              CU_GET_PROC_ADDRESS_DEFAULT, &found);
  if (asked != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS) {
    fail<SystemError>("the CUDA driver has no {} of CUDA {}.{} or later", name, version / 1000, version % 1000 / 10);
  }
  return reinterpret_cast<Function>(address);
}

}  // namespace

const Driver& driver() {
#define DEEP_EP_FIND(member, function, version) .member = find<PFN_##function##_v##version>(#function, version),
  static const Driver instance{DEEP_EP_DRIVER_FUNCTIONS(DEEP_EP_FIND)};
#undef DEEP_EP_FIND
  return instance;
}

}  // namespace deep_ep::cuda
