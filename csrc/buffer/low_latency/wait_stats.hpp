// Statistics of waits over calls: include/deep_ep/low_latency_stats.hpp, kernels/low_latency/waits.cu.
#pragma once

#include <array>
#include <memory>

#include "csrc/buffer/low_latency/plan.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/low_latency_stats.hpp"

namespace deep_ep {

/// Device memory for the statistics, from when they are first asked for until the end of the buffer: recorded graphs
/// write there.
class WaitStats {
 public:
  WaitStats(Runtime& runtime, const LowLatencySetup& setup);

  /// From now on the call is measured, too.
  void measure(LowLatencyDispatchPlan& plan) const;
  void measure(LowLatencyCombinePlan& plan) const;

  /// Behind what the stream has been given, the host waits for it.
  LowLatencyStats read(StreamHandle stream) const;

 private:
  /// Of calls of one kind, [num_ranks] each.
  struct OfKind {
    std::int64_t* cost;
    LowLatencyWaited* waited;
  };
  /// `wait_cost`: where the call adds its waits; from now on to memory of this object, from where they come back.
  std::shared_ptr<const LowLatencyWaitsParams> measure(LowLatencyKind kind, int blocks, std::int64_t*& wait_cost) const;

  Runtime& runtime_;
  LowLatencyParams common_;
  std::shared_ptr<std::byte> memory_;
  std::array<OfKind, kLowLatencyKinds> kinds_{};
  std::int64_t* clock_ = nullptr;
};

}  // namespace deep_ep
