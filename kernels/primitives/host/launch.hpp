// Puts a kernel into a stream of the host machine.
#pragma once

#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::host_machine {

template <class Kernel>
void launch(const typename Kernel::Params& params, const LaunchShape& shape, void* stream,
            void (*entry)(const void*, std::byte*)) {
  check_launch_shape(Kernel::kName, shape, Kernel::kMaxThreads);
  enqueue({Kernel::kName, shape, std::make_shared<const typename Kernel::Params>(params), entry}, stream);
}

}  // namespace deep_ep::host_machine

#define DEEP_EP_DEFINE_KERNEL(name, body)                                                             \
  namespace deep_ep::host {                                                                           \
  void launch_##name(const kernels::name::Params& params, const LaunchShape& shape, void* stream) {   \
    host_machine::launch<kernels::name>(params, shape, stream, [](const void* p, std::byte* shared) { \
      body(*static_cast<const kernels::name::Params*>(p), shared);                                    \
    });                                                                                               \
  }                                                                                                   \
  }
