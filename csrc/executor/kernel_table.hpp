// The launchers of one target. The same kernels exist for every executor; the table is how the rest of the library,
// which knows neither CUDA nor fibers, starts them.
#pragma once

#include "kernels/primitives/launch_shape.hpp"

namespace deep_ep {

struct LayoutParams;
struct NotifyParams;
struct DispatchParams;
struct CombineParams;
struct LowLatencyDispatchParams;
struct LowLatencyCombineParams;
struct LowLatencyBarrierParams;

template <class Params>
using Launcher = void (*)(const Params&, const LaunchShape&, void* stream);

struct KernelTable {
  Launcher<LayoutParams> layout = nullptr;
  Launcher<NotifyParams> notify = nullptr;
  Launcher<DispatchParams> dispatch = nullptr;
  Launcher<CombineParams> combine = nullptr;
  Launcher<LowLatencyDispatchParams> dispatch_low_latency = nullptr;
  Launcher<LowLatencyDispatchParams> dispatch_low_latency_rdma = nullptr;
  Launcher<LowLatencyCombineParams> combine_low_latency = nullptr;
  Launcher<LowLatencyCombineParams> combine_low_latency_logfmt = nullptr;
  Launcher<LowLatencyCombineParams> combine_low_latency_rdma = nullptr;
  Launcher<LowLatencyCombineParams> combine_low_latency_logfmt_rdma = nullptr;
  Launcher<LowLatencyBarrierParams> barrier_low_latency = nullptr;
};

/// Defined by csrc/executor/host/kernel_table.cpp and csrc/executor/cuda/kernel_table.cpp.
const KernelTable& host_kernels();
const KernelTable& cuda_kernels();

}  // namespace deep_ep
