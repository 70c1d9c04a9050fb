// The kernels as compiled for the GPU.
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

const KernelTable& cuda_kernels() {
  static const KernelTable table{.layout = cuda::launch_layout,
                                 .notify = cuda::launch_notify,
                                 .dispatch = cuda::launch_dispatch,
                                 .combine = cuda::launch_combine,
                                 .dispatch_low_latency = cuda::launch_dispatch_low_latency,
                                 .dispatch_low_latency_rdma = cuda::launch_dispatch_low_latency_rdma,
                                 .combine_low_latency = cuda::launch_combine_low_latency,
                                 .combine_low_latency_logfmt = cuda::launch_combine_low_latency_logfmt,
                                 .combine_low_latency_rdma = cuda::launch_combine_low_latency_rdma,
                                 .combine_low_latency_logfmt_rdma = cuda::launch_combine_low_latency_logfmt_rdma,
                                 .barrier_low_latency = cuda::launch_barrier_low_latency};
  return table;
}

}  // namespace deep_ep
