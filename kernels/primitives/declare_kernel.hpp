// What there is to know of a kernel without its code. A kernel is declared once, by
//
//   DEEP_EP_DECLARE_KERNEL(scale, deep_ep::ScaleParams, /*threads of a block, at most*/ 512)
//
// outside any namespace (those of the library in kernels/kernel_list.hpp). This declares its launchers
//   deep_ep::cuda::launch_scale(const ScaleParams&, const LaunchShape&, void* stream)
//   deep_ep::host::launch_scale(...)
//   deep_ep::cuda::load_scale(), which makes sure that no launch has to load it
// and deep_ep::kernels::scale, which says what its parameters and its largest block are. See launch.hpp for the rest.
#pragma once

#include <cstddef>

namespace deep_ep {

struct LaunchShape {
  int blocks = 1;
  int threads = 32;              ///< of a block, a multiple of 32
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block
};

}  // namespace deep_ep

#define DEEP_EP_DECLARE_KERNEL(name, ParamsType, max_threads)                           \
  namespace deep_ep::kernels {                                                          \
  struct name {                                                                         \
    using Params = ParamsType;                                                          \
    static constexpr const char* kName = #name;                                         \
    static constexpr int kMaxThreads = max_threads;                                     \
  };                                                                                    \
  }                                                                                     \
  namespace deep_ep::cuda {                                                             \
  void launch_##name(const ParamsType& params, const LaunchShape& shape, void* stream); \
  void load_##name();                                                                   \
  }                                                                                     \
  namespace deep_ep::host {                                                             \
  void launch_##name(const ParamsType& params, const LaunchShape& shape, void* stream); \
  }
