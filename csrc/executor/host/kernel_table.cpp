// The kernels as compiled for the host machine.
#include "csrc/executor/kernel_table.hpp"

#include "kernels/intranode/params.hpp"
#include "kernels/layout/params.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/launch.hpp"

DEEP_EP_DECLARE_KERNEL(layout, deep_ep::LayoutParams)
DEEP_EP_DECLARE_KERNEL(notify, deep_ep::NotifyParams)
DEEP_EP_DECLARE_KERNEL(dispatch, deep_ep::DispatchParams)
DEEP_EP_DECLARE_KERNEL(combine, deep_ep::CombineParams)
DEEP_EP_DECLARE_KERNEL(dispatch_low_latency, deep_ep::LowLatencyDispatchParams)
DEEP_EP_DECLARE_KERNEL(dispatch_low_latency_rdma, deep_ep::LowLatencyDispatchParams)
DEEP_EP_DECLARE_KERNEL(combine_low_latency, deep_ep::LowLatencyCombineParams)
DEEP_EP_DECLARE_KERNEL(combine_low_latency_logfmt, deep_ep::LowLatencyCombineParams)
DEEP_EP_DECLARE_KERNEL(combine_low_latency_rdma, deep_ep::LowLatencyCombineParams)
DEEP_EP_DECLARE_KERNEL(combine_low_latency_logfmt_rdma, deep_ep::LowLatencyCombineParams)
DEEP_EP_DECLARE_KERNEL(barrier_low_latency, deep_ep::LowLatencyBarrierParams)

namespace deep_ep {

const KernelTable& host_kernels() {
  static const KernelTable table{.layout = host::launch_layout,
                                 .notify = host::launch_notify,
                                 .dispatch = host::launch_dispatch,
                                 .combine = host::launch_combine,
                                 .dispatch_low_latency = host::launch_dispatch_low_latency,
                                 .dispatch_low_latency_rdma = host::launch_dispatch_low_latency_rdma,
                                 .combine_low_latency = host::launch_combine_low_latency,
                                 .combine_low_latency_logfmt = host::launch_combine_low_latency_logfmt,
                                 .combine_low_latency_rdma = host::launch_combine_low_latency_rdma,
                                 .combine_low_latency_logfmt_rdma = host::launch_combine_low_latency_logfmt_rdma,
                                 .barrier_low_latency = host::launch_barrier_low_latency};
  return table;
}

}  // namespace deep_ep
