// Low-latency mode: see include/deep_ep/low_latency.hpp.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "csrc/buffer/low_latency/hook_queue.hpp"
#include "csrc/buffer/low_latency/plan.hpp"
#include "csrc/buffer/low_latency/rank_masks.hpp"
#include "csrc/buffer/low_latency/rdma_links.hpp"
#include "csrc/buffer/low_latency/wait_stats.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

class LowLatency {
 public:
  /// Collective. The runtime's layout has memory for it.
  explicit LowLatency(Runtime& runtime);

  LowLatencyDispatchResult dispatch(const LowLatencyDispatchArguments& arguments, const CallOptions& call);
  LowLatencyCombineResult combine(const LowLatencyCombineArguments& arguments, const CallOptions& call);
  TensorView combine_buffer(const LowLatencyHandle& handle);
  void clean(StreamHandle stream);

  /// InvalidArgument, which names `call`, where ranks are never masked.
  RankMasks& masks(const char* call);
  /// Of waits; the first call, and the first after `stop`, begin them.
  LowLatencyStats stats(LowLatencyStatsThen then, StreamHandle stream);

  /// Collective, with masks.
  void resume();

  /// Logs which ranks are masked since the last look.
  void log_masks() {
    if (masks_) masks_->log_new();
  }

  /// From now on the program may write there, and `clean` cleans it.
  TensorView memory();
  /// A line for Buffer::describe.
  std::string describe() const;
  /// What has become of all that was posted; empty where no rank is reached by RDMA.
  std::string health() const { return links_ ? links_->health() : std::string(); }
  /// Throws what an operation of the NIC met, unless that masks a rank.
  void check() const;
  /// After the last call: waits until the peers have got all.
  void drain() noexcept {
    if (links_) links_->drain();
  }
  /// Nothing of this rank touches a peer any more.
  void disconnect() { links_.reset(); }

 private:
  /// Throws what an earlier call met, and logs which ranks it masked.
  void look_after_earlier_calls();
  /// A call that receives at once comes after those that wait for their hooks; one with a hook needs a place.
  void make_way(LowLatencyKind kind, bool hook);
  /// Enqueues the first part of a call and finishes the scope. If a hook enqueues the other part, sets `hook`; until
  /// then `kept` keeps what the kernel uses.
  template <class Params, class Kept>
  EventHandle launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope, StreamHandle caller_stream,
                     Kept kept, std::function<void()>& hook);
  HookQueue& queue(LowLatencyKind kind) const { return *queues_[static_cast<std::size_t>(kind)]; }
  LowLatencyCounts count_together();
  void resume_together();

  Runtime& runtime_;
  std::shared_ptr<LowLatencyState> state_;  ///< device memory
  std::optional<RankMasks> masks_;
  std::optional<RdmaLinks> links_;  ///< none: no rank is reached by RDMA
  LowLatencySetup setup_;
  std::optional<WaitStats> waits_;  ///< none before anybody has asked for them
  bool shown_ = false;              ///< has the program been given `memory`?
  std::array<std::shared_ptr<HookQueue>, static_cast<std::size_t>(LowLatencyKind::count)> queues_;
  /// Device memory; the last is the largest. Those before stay: views and recorded graphs may still name them.
  std::vector<std::shared_ptr<std::byte>> combine_buffers_;
  std::size_t combine_buffer_bytes_ = 0;
};

}  // namespace deep_ep
