// Low-latency mode: see include/deep_ep/low_latency.hpp.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/buffer/low_latency/hook_queue.hpp"
#include "csrc/buffer/low_latency/plan.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/rdma/connections.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// How many calls of each kind a rank counts; last, how many barriers.
using LowLatencyCounts = std::array<std::uint64_t, kLowLatencyKinds + 1>;

class LowLatency {
 public:
  /// Collective. The runtime's layout has memory for it.
  explicit LowLatency(Runtime& runtime);

  LowLatencyDispatchResult dispatch(const LowLatencyDispatchArguments& arguments, const CallOptions& call);
  LowLatencyCombineResult combine(const LowLatencyCombineArguments& arguments, const CallOptions& call);
  TensorView combine_buffer(const LowLatencyHandle& handle);
  void clean(StreamHandle stream);

  // Ranks that calls leave out: those that the control plane calls lost, and those that the program masks, in the order
  // of calls. The program's masks are apart from verdicts, and undo none. They are in ControlState, for kernels.
  /// This object, for a call `call` about masks; InvalidArgument where ranks are never masked.
  LowLatency& masking(const char* call);
  void update_mask(int rank, bool masked, StreamHandle stream);
  void query_mask(const TensorView& status, StreamHandle stream);
  void clear_mask(StreamHandle stream);
  /// Logs which ranks are masked, and which queue pairs have failed, since the last look.
  void log_masks();

  // Collective, with masks.
  void resume();
  /// The first half of resume(), by this rank alone: what it has begun is over.
  void begin_resume();
  /// The second: all ranks go on together, also with processes whose buffers are new.
  void resume_together();

  /// From now on the program may write there, and `clean` cleans it.
  TensorView memory();
  /// A line for Buffer::describe.
  std::string describe() const;
  /// What has become of all that was posted; empty where no rank is reached by RDMA.
  std::string health() const { return connections_ ? connections_->health() : std::string(); }
  /// Throws what an operation of the NIC met, unless that masks a rank.
  void check() const;
  /// After the last call: its kernels have ended, but what they posted may not have reached the peers, who wait for it.
  void drain() noexcept {
    if (connections_) connections_->drain(runtime_.timeout_s());
  }
  /// Nothing of this rank touches a peer any more.
  void disconnect() { connections_.reset(); }

 private:
  /// Throws what an earlier call met, and logs which ranks it masked.
  void look_after_earlier_calls();
  /// A call that receives at once comes after those that wait for their hooks; one with a hook needs a place.
  void make_way(LowLatencyKind kind, bool hook);
  /// Enqueues the first part of a call and finishes the scope. If a hook enqueues the other part, sets `hook`; until
  /// then what `keep()` returns keeps what the kernel uses.
  template <class Params, class Keep>
  EventHandle launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope, StreamHandle caller_stream,
                     const Keep& keep, std::function<void()>& hook);
  /// For people: whom calls reach, whether by rails, over which NIC.
  std::string describe_reach() const;
  HookQueue& queue(LowLatencyKind kind) const { return *queues_[static_cast<std::size_t>(kind)]; }
  bool masks() const { return runtime_.options().low_latency.masking; }
  void launch_masks(LowLatencyMasksStep step, int rank, std::int32_t* status, StreamHandle stream);
  LowLatencyCounts count_together();
  /// After all ranks have ended their work: new queue pairs, and all that was told over the old ones as it would be
  /// after so many calls.
  void reconnect(const LowLatencyCounts& counts);

  Runtime& runtime_;
  std::shared_ptr<LowLatencyState> state_;  ///< device memory
  // Null where no rank is reached by RDMA. Device memory, [num_ranks]: what ranks have been told by RDMA.
  std::unique_ptr<rdma::Connections> connections_;
  std::shared_ptr<LowLatencyTold> told_;
  LowLatencySetup setup_;
  bool shown_ = false;                 ///< has the program been given `memory`?
  std::size_t logged_ = 0;             ///< verdicts
  std::vector<bool> failures_logged_;  ///< [num_ranks], with masking
  std::array<std::shared_ptr<HookQueue>, static_cast<std::size_t>(LowLatencyKind::count)> queues_;
  /// Device memory; the last is the largest. Those before stay: views and recorded graphs may still name them.
  std::vector<std::shared_ptr<std::byte>> combine_buffers_;
  std::size_t combine_buffer_bytes_ = 0;
};

// How calls of both kinds reach the executor.

/// A call ends in one way.
inline void check_end(bool return_recv_hook, const CallOptions& call) {
  if (!return_recv_hook || !call.async_finish) return;
  throw InvalidArgument("return_recv_hook and async_finish are both true, allowed: at most one of them");
}

template <class Params>
void enqueue_part(const KernelTable& kernels, const LowLatencyPlan<Params>& plan, const LowLatencyPart& part,
                  StreamHandle stream) {
  Params params = plan.params;
  params.phase = part.phase;
  params.common.working_blocks = part.working_blocks;
  if constexpr (requires { params.signals; }) params.signals.rows_of_group = part.rows_of_group;
  (kernels.*plan.kernel)(params, part.shape, stream);
}

template <class Params, class Keep>
EventHandle LowLatency::launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope,
                               StreamHandle caller_stream, const Keep& keep, std::function<void()>& hook) {
  enqueue_part(runtime_.executor()->kernels(), plan, plan.first, scope.stream());
  if (!plan.receive) return scope.finish();
  // The receive part is a call of its own, on the same stream, whenever the hook comes. A hook that failed may come
  // again, but the part must not.
  hook = queue(kind).add([this, kind, caller_stream, recorded = scope.recording(), plan = LowLatencyPlan<Params>(plan),
                          kept = keep(), enqueued = false]() mutable {
    Backend& executor = *runtime_.executor();
    if (executor.is_capturing(caller_stream) != recorded) {
      fail<InvalidArgument>("{}: its send part was {} into a graph, so its receive part must be, too: call the hook {}",
                            kind == LowLatencyKind::dispatch ? "low_latency_dispatch" : "low_latency_combine",
                            recorded ? "recorded" : "not recorded",
                            recorded ? "before the recording ends" : "before the recording begins");
    }
    CallScope receiving(runtime_.calls(), {.stream = caller_stream});
    if (!enqueued) enqueue_part(executor.kernels(), plan, *plan.receive, receiving.stream());
    enqueued = true;
    receiving.finish();
  });
  try {
    return scope.finish();
  } catch (...) {
    // The send part is on its way, so the receive part must follow for ranks to go on counting calls alike; but the
    // caller gets no hook.
    scope.abandon();
    try {
      hook();
    } catch (const std::exception& error) {
      log::debug("buffer: the receive part of a low-latency call that failed still waits: {}", error.what());
    }
    throw;
  }
}

}  // namespace deep_ep
