// The kernels as compiled for the GPU.
#include "csrc/executor/kernel_table.hpp"

namespace deep_ep {

const KernelTable& cuda_kernels() {
#define DEEP_EP_LAUNCHER(name, Params, max_threads) .name = cuda::launch_##name,
  static const KernelTable table{DEEP_EP_KERNELS(DEEP_EP_LAUNCHER)};
#undef DEEP_EP_LAUNCHER
  return table;
}

void load_cuda_kernels() {
#define DEEP_EP_LOAD(name, Params, max_threads) cuda::load_##name();
  DEEP_EP_KERNELS(DEEP_EP_LOAD)
#undef DEEP_EP_LOAD
}

}  // namespace deep_ep
