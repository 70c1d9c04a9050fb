// The launchers of one target. The same kernels exist for every executor; the table is how the rest of the library,
// which knows neither CUDA nor fibers, starts them.
#pragma once

#include "kernels/kernel_list.hpp"

namespace deep_ep {

template <class Params>
using Launcher = void (*)(const Params&, const LaunchShape&, void* stream);

/// One member a kernel, of the kernel's name.
struct KernelTable {
#define DEEP_EP_MEMBER(name, Params, max_threads) Launcher<Params> name = nullptr;
  DEEP_EP_KERNELS(DEEP_EP_MEMBER)
#undef DEEP_EP_MEMBER
};

/// Defined by csrc/executor/host/kernel_table.cpp and csrc/executor/cuda/kernel_table.cpp.
const KernelTable& host_kernels();
const KernelTable& cuda_kernels();
/// All of them, for the current device.
void load_cuda_kernels();

}  // namespace deep_ep
