// From a kernel's body to its launcher. At the end of a kernel's .cu file, outside any namespace:
//
//   DEEP_EP_DEFINE_KERNEL(scale, deep_ep::device::scale_body)
//
// for a kernel of declare_kernel.hpp and `DEEP_EP_DEVICE void scale_body(const ScaleParams&, std::byte* shared)`. Makes
// scale::launch_cuda by nvcc, scale::launch_host as C++. Params are copied into the launch; shared memory has
// shape.shared_bytes bytes and is aligned to 1024.
#pragma once

#include <string>

#include "deep_ep/error.hpp"
#include "kernels/primitives/declare_kernel.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep {

inline void check_launch_shape(const char* kernel, const LaunchShape& shape, int max_threads) {
  if (shape.blocks >= 1 && shape.threads >= 32 && shape.threads <= max_threads && shape.threads % 32 == 0) return;
  throw InvalidArgument("kernel " + std::string(kernel) + ": " + std::to_string(shape.blocks) + " blocks of " +
                        std::to_string(shape.threads) + " threads; a block has 32 to " + std::to_string(max_threads) +
                        " threads, a multiple of 32");
}

}  // namespace deep_ep

#if DEEP_EP_TARGET_CUDA
#include "kernels/primitives/cuda/launch.hpp"
#else
#include "kernels/primitives/host/launch.hpp"
#endif
