// What there is to know of a kernel without its code. A kernel is declared once, by
//
//   DEEP_EP_DECLARE_KERNEL(scale, deep_ep::ScaleParams, /*threads of a block, at most*/ 512)
//
// outside any namespace (those of the library in kernels/kernel_list.hpp). This declares deep_ep::kernels::scale, which
// has its parameters, its largest block and its launchers; load_cuda() makes sure that no launch has to load it. See
// launch.hpp for the rest.
#pragma once

#include <cstddef>

namespace deep_ep {

struct LaunchShape {
  int blocks = 1;
  int threads = 32;              ///< of a block, a multiple of 32
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block
};

}  // namespace deep_ep

#define DEEP_EP_DECLARE_KERNEL(name, ParamsType, max_threads)                              \
  namespace deep_ep::kernels {                                                             \
  struct name {                                                                            \
    using Params = ParamsType;                                                             \
    static constexpr const char* kName = #name;                                            \
    static constexpr int kMaxThreads = max_threads;                                        \
    static void launch_host(const Params& params, const LaunchShape& shape, void* stream); \
    static void launch_cuda(const Params& params, const LaunchShape& shape, void* stream); \
    static void load_cuda();                                                               \
  };                                                                                       \
  }
