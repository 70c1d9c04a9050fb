// All kernels of the library: name, parameters, and threads of the largest block, as many as have registers enough.
// Declarations, the launchers of every executor and the limits that host code keeps to come from this list; to add a
// kernel is to write its file and its line here.
//
// Upstream's test of normal mode between nodes looks for one kernel "dispatch" (or "combine") and one "notify" in what
// a profiler recorded of a cached call. Here that is one kernel, which also tells its node where rows are: hence its
// name.
#pragma once

#include "kernels/primitives/declare_kernel.hpp"

// clang-format off
#define DEEP_EP_KERNELS(KERNEL)                                                             \
  KERNEL(layout,                                   deep_ep::LayoutParams,             1024) \
  KERNEL(notify,                                   deep_ep::NotifyParams,              768) \
  KERNEL(dispatch,                                 deep_ep::DispatchParams,            512) \
  KERNEL(combine,                                  deep_ep::CombineParams,             512) \
  KERNEL(barrier,                                  deep_ep::ElasticBarrierParams,      128) \
  KERNEL(dispatch_elastic,                         deep_ep::ElasticDispatchParams,     512) \
  KERNEL(combine_elastic,                          deep_ep::ElasticCombineParams,      512) \
  KERNEL(prefetch_weights,                         deep_ep::LoadBalanceParams,         256) \
  KERNEL(reduce_grads,                             deep_ep::LoadBalanceParams,         512) \
  KERNEL(copy_received,                            deep_ep::CopyReceivedParams,        256) \
  KERNEL(notify_internode,                         deep_ep::NotifyParams,              512) \
  KERNEL(dispatch_and_notify_internode,            deep_ep::DispatchParams,            384) \
  KERNEL(combine_and_notify_internode,             deep_ep::CombineParams,             384) \
  KERNEL(dispatch_low_latency,                     deep_ep::LowLatencyDispatchParams,  512) \
  KERNEL(dispatch_low_latency_rdma,                deep_ep::LowLatencyDispatchParams,  512) \
  KERNEL(combine_low_latency,                      deep_ep::LowLatencyCombineParams,   512) \
  KERNEL(combine_low_latency_rdma,                 deep_ep::LowLatencyCombineParams,   384) \
  KERNEL(combine_low_latency_unreduced,            deep_ep::LowLatencyCombineParams,   512) \
  KERNEL(barrier_low_latency,                      deep_ep::LowLatencyBarrierParams,   128) \
  KERNEL(masks_low_latency,                        deep_ep::LowLatencyMasksParams,     128) \
  KERNEL(number_selections,                        deep_ep::NumberRowsParams,          512) \
  KERNEL(spread_rows,                              deep_ep::SpreadRowsParams,          256) \
  KERNEL(address_rows,                             deep_ep::AddressRowsParams,         512) \
  KERNEL(find_returned_rows,                       deep_ep::SumRowsParams,             256) \
  KERNEL(sum_rows,                                 deep_ep::SumRowsParams,             256) \
  KERNEL(nic_test,                                 deep_ep::NicTestParams,             512) \
  KERNEL(simulated_nic,                            deep_ep::SimulatedNicParams,        640)
// clang-format on

namespace deep_ep {
struct LayoutParams;
struct NotifyParams;
struct DispatchParams;
struct CopyReceivedParams;
struct CombineParams;
struct ElasticBarrierParams;
struct ElasticDispatchParams;
struct ElasticCombineParams;
struct LoadBalanceParams;
struct LowLatencyDispatchParams;
struct LowLatencyCombineParams;
struct LowLatencyBarrierParams;
struct LowLatencyMasksParams;
struct SumRowsParams;
struct NumberRowsParams;
struct SpreadRowsParams;
struct AddressRowsParams;
struct NicTestParams;
struct SimulatedNicParams;
}  // namespace deep_ep

DEEP_EP_KERNELS(DEEP_EP_DECLARE_KERNEL)
