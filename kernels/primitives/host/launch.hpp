// Puts a kernel into a stream of the host machine.
#pragma once

#include <cstddef>
#include <memory>

#include "kernels/primitives/declare_kernel.hpp"

namespace deep_ep::host_machine {

/// A kernel launch waiting in a stream: entry(params, shared memory) runs once per thread.
struct KernelLaunch {
  const char* name = "";
  LaunchShape shape;
  std::shared_ptr<const void> params;
  void (*entry)(const void* params, std::byte* shared) = nullptr;
};

/// Puts the launch into a stream; nullptr is the default stream of the calling thread's executor. A pointer, so that
/// tests can put something before the machine's function.
[[gnu::visibility("default")]] extern void (*enqueue)(KernelLaunch launch, void* stream);

}  // namespace deep_ep::host_machine

#define DEEP_EP_DEFINE_KERNEL(name, body)                                                                      \
  void deep_ep::kernels::name::launch_host(const Params& params, const LaunchShape& shape, void* stream) {     \
    check_launch_shape(kName, shape, kMaxThreads);                                                             \
    const auto entry = [](const void* p, std::byte* shared) { body(*static_cast<const Params*>(p), shared); }; \
    host_machine::enqueue({kName, shape, std::make_shared<const Params>(params), entry}, stream);              \
  }
