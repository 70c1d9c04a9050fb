// Puts a kernel into a stream of the host machine.
#pragma once

#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::host_machine {

template <class Kernel>
void launch(const typename Kernel::Params& params, const LaunchShape& shape, void* stream,
            void (*entry)(const void*, std::byte*)) {
  check_launch_shape(Kernel::kName, shape, Kernel::kMaxThreads);
  auto* queue = static_cast<LaunchQueue*>(stream);
  if (queue == nullptr) {
    const DefaultQueue find = default_queue.load(std::memory_order_acquire);
    if (find == nullptr) throw Error("kernel " + std::string(Kernel::kName) + ": there is no host executor");
    queue = &find();
  }
  queue->launch({Kernel::kName, shape, std::make_shared<const typename Kernel::Params>(params), entry});
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
