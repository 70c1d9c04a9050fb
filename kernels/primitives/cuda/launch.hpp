// Launches a __global__ function of the form that DEEP_EP_DEFINE_KERNEL makes.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace deep_ep::cuda {

/// Every kernel's first instruction: waits until the kernel before it in the stream has ended and its writes are
/// visible. On 4 x H200 this makes a low-latency combine after a dispatch two microseconds faster than an ordinary
/// launch.
__device__ __forceinline__ void begin_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

[[gnu::visibility("hidden")]] inline void check_launch(cudaError_t status, const char* kernel,
                                                       const LaunchShape& shape) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a launch error is not sticky: do not let the next caller find it
  throw SystemError("launching kernel " + std::string(kernel) + " with " + std::to_string(shape.blocks) +
                    " blocks of " + std::to_string(shape.threads) + " threads and " +
                    std::to_string(shape.shared_bytes) + " bytes of shared memory: " + cudaGetErrorString(status));
}

template <class Kernel>
void launch(void (*kernel)(typename Kernel::Params), const typename Kernel::Params& params, const LaunchShape& shape,
            void* stream) {
  constexpr int kDevices = 64;
  static std::atomic<std::size_t> allowed_bytes[kDevices];  // of dynamic shared memory so far, by device ordinal
  check_launch_shape(Kernel::kName, shape, Kernel::kMaxThreads);
  constexpr std::size_t kAlwaysAllowed = 48 * 1024;
  if (shape.shared_bytes > kAlwaysAllowed) {
    int device = 0;
    check_launch(cudaGetDevice(&device), Kernel::kName, shape);
    auto& allowed = allowed_bytes[device % kDevices];
    if (allowed.load(std::memory_order_relaxed) < shape.shared_bytes) {
      check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shape.shared_bytes)),
                   Kernel::kName, shape);
      allowed.store(shape.shared_bytes, std::memory_order_relaxed);
    }
  }
  // Programmatic dependent launch: the blocks get to their SMs while the kernel before is ending, see begin_kernel.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check_launch(cudaLaunchKernelEx(&config, kernel, params), Kernel::kName, shape);
}

/// Asking for a function's attributes loads it. An instance for each kernel, not for each type of parameters: a program
/// with kernels of its own has its own runtime, which does not know those of the library.
template <class Kernel>
void load(void (*kernel)(typename Kernel::Params)) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw SystemError("loading kernel " + std::string(Kernel::kName) + ": " + cudaGetErrorString(status));
}

}  // namespace deep_ep::cuda

#define DEEP_EP_DEFINE_KERNEL(name, body)                                                                  \
  namespace deep_ep::cuda {                                                                                \
  __global__ void __launch_bounds__(kernels::name::kMaxThreads, 1) name                                    \
      ##_kernel(const __grid_constant__ kernels::name::Params params) {                                    \
    extern __shared__ __align__(1024) std::byte shared_memory[];                                           \
    begin_kernel();                                                                                        \
    body(params, shared_memory);                                                                           \
  }                                                                                                        \
  }                                                                                                        \
  void deep_ep::kernels::name::launch_cuda(const Params& params, const LaunchShape& shape, void* stream) { \
    cuda::launch<name>(cuda::name##_kernel, params, shape, stream);                                        \
  }                                                                                                        \
  void deep_ep::kernels::name::load_cuda() { cuda::load<name>(cuda::name##_kernel); }
