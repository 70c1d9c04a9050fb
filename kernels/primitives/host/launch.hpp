// Puts a kernel into a stream of the host machine.
#pragma once

#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::host_machine {

/// Puts the launch into a stream; nullptr is the default stream of the calling thread's executor.
inline void enqueue(KernelLaunch launch, void* stream) {
  auto* queue = static_cast<LaunchQueue*>(stream);
  if (queue == nullptr) {
    const DefaultQueue find = default_queue.load(std::memory_order_acquire);
    if (find == nullptr) throw Error("kernel " + std::string(launch.name) + ": there is no host executor");
    queue = &find();
  }
  queue->launch(std::move(launch));
}

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
