// Low-latency dispatch with what plain calls do not pay for, in kernels of their own: arrival counters (arrivals.hpp),
// rows with one FP8 scale, and NVFP4 rows.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/body.hpp"
#include "kernels/primitives/launch.hpp"

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra, (deep_ep::device::low_latency::dispatch_body<false, true>))
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra_rdma, (deep_ep::device::low_latency::dispatch_body<true, true>))
