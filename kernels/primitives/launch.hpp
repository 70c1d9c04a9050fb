// From a kernel's body to its launcher. At the end of a kernel's .cu file, outside any namespace:
//
//   DEEP_EP_DEFINE_KERNEL(dispatch, deep_ep::DispatchParams, deep_ep::device::dispatch_body, 1024)
//
// where the body is `DEEP_EP_DEVICE void dispatch_body(const DispatchParams& params, std::byte* shared)`. This makes
//   deep_ep::cuda::launch_dispatch(const DispatchParams&, const LaunchShape&, void* stream)   compiled by nvcc, or
//   deep_ep::host::launch_dispatch(...)                                                       compiled as C++.
// Params are copied into the launch; shared memory has shape.shared_bytes bytes and is aligned to 1024.
#pragma once

#include "kernels/primitives/launch_shape.hpp"
#include "kernels/primitives/target.hpp"

#if DEEP_EP_TARGET_CUDA

#include "kernels/primitives/cuda/launch.hpp"

#define DEEP_EP_DEFINE_KERNEL(name, Params, body, max_threads)                                             \
  namespace deep_ep::cuda {                                                                                \
  __global__ void __launch_bounds__(max_threads, 1) name##_kernel(const __grid_constant__ Params params) { \
    extern __shared__ __align__(1024) std::byte shared_memory[];                                           \
    begin_kernel();                                                                                        \
    body(params, shared_memory);                                                                           \
  }                                                                                                        \
  void launch_##name(const Params& params, const LaunchShape& shape, void* stream) {                       \
    static SharedMemoryLimit limit;                                                                        \
    launch(#name, name##_kernel, limit, params, shape, max_threads, stream);                               \
  }                                                                                                        \
  }

#else

#include "kernels/primitives/host/launch.hpp"

#define DEEP_EP_DEFINE_KERNEL(name, Params, body, max_threads)                                                    \
  namespace deep_ep::host {                                                                                       \
  void launch_##name(const Params& params, const LaunchShape& shape, void* stream) {                              \
    host_machine::launch(#name, params, shape, max_threads, stream,                                               \
                         [](const void* p, std::byte* shared) { body(*static_cast<const Params*>(p), shared); }); \
  }                                                                                                               \
  }

#endif

/// Declares both launchers, for those who call them (kernel tables, tests).
#define DEEP_EP_DECLARE_KERNEL(name, Params)                                        \
  namespace deep_ep::cuda {                                                         \
  void launch_##name(const Params& params, const LaunchShape& shape, void* stream); \
  }                                                                                 \
  namespace deep_ep::host {                                                         \
  void launch_##name(const Params& params, const LaunchShape& shape, void* stream); \
  }
