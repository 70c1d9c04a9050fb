// Low-latency dispatch with what plain calls do not pay for, in kernels of their own: arrival counters (arrivals.hpp),
// rows with one FP8 scale, and NVFP4 rows.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/body.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

DEEP_EP_DEVICE void dispatch_extra_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  dispatch_body<false, true>(params, memory);
}

DEEP_EP_DEVICE void dispatch_extra_rdma_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  dispatch_body<true, true>(params, memory);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra, deep_ep::device::low_latency::dispatch_extra_body)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra_rdma, deep_ep::device::low_latency::dispatch_extra_rdma_body)
