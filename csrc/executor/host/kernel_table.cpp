// The kernels as compiled for the host machine.
#include "csrc/executor/kernel_table.hpp"

#include "kernels/intranode/params.hpp"
#include "kernels/layout/params.hpp"
#include "kernels/primitives/launch.hpp"

DEEP_EP_DECLARE_KERNEL(layout, deep_ep::LayoutParams)
DEEP_EP_DECLARE_KERNEL(notify, deep_ep::NotifyParams)
DEEP_EP_DECLARE_KERNEL(dispatch, deep_ep::DispatchParams)
DEEP_EP_DECLARE_KERNEL(combine, deep_ep::CombineParams)

namespace deep_ep {

const KernelTable& host_kernels() {
  static const KernelTable table{host::launch_layout, host::launch_notify, host::launch_dispatch, host::launch_combine};
  return table;
}

}  // namespace deep_ep
