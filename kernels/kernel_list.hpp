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
#define DEEP_EP_KERNELS(KERNEL)                                                    \
  KERNEL(layout,                                   LayoutParams,             1024) \
  KERNEL(notify,                                   NotifyParams,              768) \
  KERNEL(dispatch,                                 DispatchParams,            512) \
  KERNEL(combine,                                  CombineParams,             512) \
  KERNEL(barrier,                                  IntranodeParams,           128) \
  KERNEL(dispatch_elastic,                         ElasticDispatchParams,     512) \
  KERNEL(combine_elastic,                          ElasticCombineParams,      512) \
  KERNEL(move_replicas,                            LoadBalanceParams,         512) \
  KERNEL(dispatch_and_notify_internode,            DispatchParams,            384) \
  KERNEL(combine_and_notify_internode,             CombineParams,             384) \
  KERNEL(dispatch_low_latency,                     LowLatencyDispatchParams,  512) \
  KERNEL(dispatch_low_latency_weighted,            LowLatencyDispatchParams,  512) \
  KERNEL(dispatch_low_latency_rdma,                LowLatencyDispatchParams,  384) \
  KERNEL(combine_low_latency,                      LowLatencyCombineParams,   512) \
  KERNEL(combine_low_latency_weighted,             LowLatencyCombineParams,   512) \
  KERNEL(combine_low_latency_rdma,                 LowLatencyCombineParams,   384) \
  KERNEL(combine_low_latency_unreduced,            LowLatencyCombineParams,   512) \
  KERNEL(barrier_low_latency,                      LowLatencyParams,          128) \
  KERNEL(masks_low_latency,                        LowLatencyMasksParams,     128) \
  KERNEL(number_selections,                        NumberRowsParams,          512) \
  KERNEL(spread_rows,                              SpreadRowsParams,          256) \
  KERNEL(sum_rows,                                 SumRowsParams,             256) \
  KERNEL(nic_test,                                 NicTestParams,             512) \
  KERNEL(simulated_nic,                            SimulatedNicParams,        640)
// clang-format on

namespace deep_ep {
#define DEEP_EP_PARAMS(name, Params, max_threads) struct Params;
DEEP_EP_KERNELS(DEEP_EP_PARAMS)
#undef DEEP_EP_PARAMS
}  // namespace deep_ep

DEEP_EP_KERNELS(DEEP_EP_DECLARE_KERNEL)
