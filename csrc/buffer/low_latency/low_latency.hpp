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

/// The receive parts of one kind of calls that wait for their hooks, in the order in which they were sent.
struct WaitingParts {
  /// Places in the window alternate between two calls, so no more may be under way.
  static constexpr std::size_t kMost = 2;

  const char* call;                              ///< for messages
  std::deque<std::function<void()>> parts = {};  ///< that enqueue them, and hold what their kernels use until then
  std::uint64_t gone = 0;                        ///< how many waited before those

  std::uint64_t end() const { return gone + parts.size(); }
  /// Enqueues the first `number` of all that have waited, but those that are gone.
  void receive(std::uint64_t number) {
    while (gone < number) {
      parts.front()();
      const auto done = std::move(parts.front());  // what it holds may make calls of this kind when it goes
      parts.pop_front();
      ++gone;
    }
  }
};

class LowLatency : public std::enable_shared_from_this<LowLatency> {
 public:
  /// Collective. The runtime's layout has memory for it.
  explicit LowLatency(Runtime& runtime);

  /// Logs which ranks are masked, and which queue pairs have failed, since the last look.
  void log_masks();

  // With masks.
  /// The first half of low_latency_resume, by this rank alone: what it has begun is over.
  void begin_resume();
  /// The second, collective: all ranks go on together, also with processes whose buffers are new.
  void resume_together();

  /// A line for Buffer::describe: also which ranks calls reach how, and over which NIC.
  std::string describe() const;

 private:
  friend class Buffer;

  /// The scope of a call. Throws what an earlier call met, and logs which ranks it masked. A call that receives at once
  /// comes after those that wait for their hooks; one with a hook needs a place, and ends in no other way.
  CallScope begin(LowLatencyKind kind, bool hook, const CallOptions& call);
  /// Enqueues the first part of a call and finishes the scope. If a hook enqueues the other part, sets `hook`; until
  /// then what `keep()` returns keeps what the kernel uses.
  template <class Params, class Keep>
  EventHandle launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope, StreamHandle caller_stream,
                     const Keep& keep, std::function<void()>& hook);
  WaitingParts& waiting(LowLatencyKind kind) { return waiting_[static_cast<std::size_t>(kind)]; }
  // Ranks that calls leave out: those that the control plane calls lost, and those that the program masks, in the order
  // of calls. The program's masks are apart from verdicts, and undo none. They are in ControlState, for kernels.
  bool masks() const { return runtime_.options().low_latency.masking; }
  void launch_masks(LowLatencyMasksStep step, int rank, std::int32_t* status, StreamHandle stream);
  /// From here on all ranks have made so many calls of each kind, and barriers.
  std::uint64_t count_together();
  /// After all ranks have ended their work: new queue pairs, and all that was told over the old ones as it would be
  /// after so many calls.
  void reconnect(std::uint64_t calls);

  Runtime& runtime_;
  std::shared_ptr<LowLatencyState> state_;  ///< device memory
  // Null where no rank is reached by RDMA. Device memory, [num_ranks][kinds]: what ranks have been told by RDMA.
  rdma::Connections* connections_ = nullptr;
  std::shared_ptr<LowLatencyMailbox> told_;
  LowLatencySetup setup_;
  bool shown_ = false;                 ///< has the program been given the memory of calls? It may write there
  std::size_t logged_ = 0;             ///< verdicts
  std::vector<bool> failures_logged_;  ///< [num_ranks], with masking
  std::array<WaitingParts, kLowLatencyKinds> waiting_ = {
      {{.call = "low_latency_dispatch"}, {.call = "low_latency_combine"}}};
  /// Device memory; the last is the largest. Those before stay: views and recorded graphs may still name them.
  std::vector<std::shared_ptr<std::byte>> combine_buffers_;
  std::size_t combine_buffer_bytes_ = 0;
};

// How calls of both kinds reach the executor.

inline CallScope LowLatency::begin(LowLatencyKind kind, bool hook, const CallOptions& call) {
  if (hook && call.async_finish) {
    throw InvalidArgument("return_recv_hook and async_finish are both true, allowed: at most one of them");
  }
  runtime_.faults().raise();
  log_masks();
  WaitingParts& of_kind = waiting(kind);
  if (!hook) of_kind.receive(of_kind.end());
  if (of_kind.parts.size() >= WaitingParts::kMost) {
    fail<InvalidArgument>(
        "{}: {} calls with return_recv_hook still wait for their hooks, at most {} may; call one first", of_kind.call,
        of_kind.parts.size(), WaitingParts::kMost);
  }
  return CallScope(runtime_.calls(), call, false);
}

template <class Params, class Keep>
EventHandle LowLatency::launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope,
                               StreamHandle caller_stream, const Keep& keep, std::function<void()>& hook) {
  plan.enqueue(plan.first, runtime_.executor()->kernels(), scope.stream());
  if (!plan.receive) return scope.finish();
  // The receive part is a call of its own, on the same stream, whenever the hook comes. A hook that failed may come
  // again, but the part must not.
  WaitingParts& of_kind = waiting(kind);
  of_kind.parts.emplace_back([this, caller_stream, call = of_kind.call, recorded = scope.recording(),
                              plan = LowLatencyPlan<Params>(plan), kept = keep(), enqueued = false]() mutable {
    Backend& executor = *runtime_.executor();
    if (executor.is_capturing(caller_stream) != recorded) {
      fail<InvalidArgument>("{}: its send part was {} into a graph, so its receive part must be, too: call the hook {}",
                            call, recorded ? "recorded" : "not recorded",
                            recorded ? "before the recording ends" : "before the recording begins");
    }
    CallScope receiving(runtime_.calls(), {.stream = caller_stream});
    if (!enqueued) plan.enqueue(*plan.receive, executor.kernels(), receiving.stream());
    enqueued = true;
    receiving.finish();
  });
  hook = [buffer = weak_from_this(), kind, number = of_kind.end()] {
    const auto alive = buffer.lock();
    if (!alive) throw UseAfterDestroy("the hook of a low-latency call after the buffer's destroy");
    const BufferCall use(alive->runtime_, "a hook of low-latency calls");
    alive->waiting(kind).receive(number);
  };
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
