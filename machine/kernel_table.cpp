// The kernels as compiled for the host machine.
#include "csrc/executor/kernel_table.hpp"

namespace deep_ep {

const KernelTable& host_kernels() {
#define DEEP_EP_LAUNCHER(name, Params, max_threads) .name = host::launch_##name,
  static const KernelTable table{DEEP_EP_KERNELS(DEEP_EP_LAUNCHER)};
#undef DEEP_EP_LAUNCHER
  return table;
}

}  // namespace deep_ep
