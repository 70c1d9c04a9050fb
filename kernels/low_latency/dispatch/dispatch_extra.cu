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

/// See dispatch.cu. Without arrival counters.
DEEP_EP_DEVICE void dispatch_extra_watched_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  run_watched<kDispatch>(params, memory, dispatch_body<false, true>);
}
DEEP_EP_DEVICE void dispatch_extra_rdma_watched_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  run_watched<kDispatch, DispatchDebts>(params, memory, dispatch_body<true, true>);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra, deep_ep::device::low_latency::dispatch_extra_body)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra_rdma, deep_ep::device::low_latency::dispatch_extra_rdma_body)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra_watched, deep_ep::device::low_latency::dispatch_extra_watched_body)
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_extra_rdma_watched,
                      deep_ep::device::low_latency::dispatch_extra_rdma_watched_body)
