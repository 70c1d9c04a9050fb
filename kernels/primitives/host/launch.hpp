// Puts a kernel into a stream of the host machine.
#pragma once

#include "kernels/primitives/host/machine.hpp"

#define DEEP_EP_DEFINE_KERNEL(name, body)                                                                              \
  namespace deep_ep::host {                                                                                            \
  void launch_##name(const kernels::name::Params& params, const LaunchShape& shape, void* stream) {                    \
    using Kernel = kernels::name;                                                                                      \
    check_launch_shape(Kernel::kName, shape, Kernel::kMaxThreads);                                                     \
    const auto entry = [](const void* p, std::byte* shared) { body(*static_cast<const Kernel::Params*>(p), shared); }; \
    host_machine::enqueue({Kernel::kName, shape, std::make_shared<const Kernel::Params>(params), entry}, stream);      \
  }                                                                                                                    \
  }
