// Low-latency mode: see include/deep_ep/low_latency.hpp.
#pragma once

#include <array>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/buffer/low_latency/plan.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/rdma/connections.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// The calls of one kind, whose receive parts run in the order in which they were sent. Used by one thread at a time.
/// Only the buffer keeps it, so that hooks find out when the buffer is gone.
class HookQueue : public std::enable_shared_from_this<HookQueue> {
 public:
  /// Places in the window alternate between two calls, so no more may be under way.
  static constexpr std::size_t kMostWaiting = 2;

  /// @param call for messages. @param one_thread of the buffer: a hook is a call of it.
  HookQueue(const char* call, OneThread& one_thread) : call_(call), one_thread_(one_thread) {}

  /// InvalidArgument if the most parts allowed already wait for their hooks.
  void require_room() const {
    if (waiting_.size() < kMostWaiting) return;
    fail<InvalidArgument>(
        "{}: {} calls with return_recv_hook still wait for their hooks, at most {} may; call one first", call_,
        waiting_.size(), kMostWaiting);
  }
  /// Adds a receive part, which `enqueue` enqueues; it holds what the kernel needs until then. Returns its hook, which
  /// does that after those that were sent before it; nothing if that has happened.
  std::function<void()> add(std::function<void()> enqueue) {
    waiting_.push_back(std::make_shared<std::function<void()>>(std::move(enqueue)));
    return [queue = weak_from_this(), part = waiting_.back()] {
      const auto alive = queue.lock();
      if (!alive) throw UseAfterDestroy("the hook of a low-latency call after the buffer's destroy");
      const OneThread::Use use(alive->one_thread_, "a hook of low-latency calls");
      while (*part) alive->receive_first();
    };
  }
  /// Enqueues all that wait: before a call that receives at once.
  void receive_all() {
    while (!waiting_.empty()) receive_first();
  }
  /// Forgets all that wait.
  void drop_all() {
    for (const auto& part : waiting_) *part = nullptr;
    waiting_.clear();
  }

 private:
  void receive_first() {
    (*waiting_.front())();
    *waiting_.front() = nullptr;
    waiting_.pop_front();
  }

  const char* call_;
  OneThread& one_thread_;
  std::deque<std::shared_ptr<std::function<void()>>> waiting_;
};

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

 private:
  /// Throws what an earlier call met, and logs which ranks it masked. A call that receives at once comes after those
  /// that wait for their hooks; one with a hook needs a place, and ends in no other way.
  void begin(LowLatencyKind kind, bool hook, const CallOptions& call);
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
  rdma::Connections* connections_ = nullptr;
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

inline void LowLatency::begin(LowLatencyKind kind, bool hook, const CallOptions& call) {
  if (hook && call.async_finish) {
    throw InvalidArgument("return_recv_hook and async_finish are both true, allowed: at most one of them");
  }
  runtime_.faults().raise();
  log_masks();
  hook ? queue(kind).require_room() : queue(kind).receive_all();
}

template <class Params, class Keep>
EventHandle LowLatency::launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope,
                               StreamHandle caller_stream, const Keep& keep, std::function<void()>& hook) {
  plan.enqueue(plan.first, runtime_.executor()->kernels(), scope.stream());
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
    if (!enqueued) plan.enqueue(*plan.receive, executor.kernels(), receiving.stream());
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
