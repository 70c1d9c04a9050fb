// Low-latency mode: see include/deep_ep/low_latency.hpp.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/buffer/low_latency/plan.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// The receive parts of one kind of calls that wait for their hooks, in the order in which they were sent.
struct WaitingParts {
  /// Places in the window alternate between two calls, so no more may be under way.
  static constexpr std::size_t kMost = 2;

  struct Part {
    StreamHandle stream = nullptr;                       ///< the caller's
    bool recorded = false;                               ///< is the send part in a graph?
    std::function<void(const CallScope&)> enqueue = {};  ///< holds what the kernel uses until then
  };
  const char* call;  ///< for messages
  std::deque<Part> parts = {};
  std::uint64_t gone = 0;  ///< how many waited before those

  std::uint64_t end() const { return gone + parts.size(); }
};

class LowLatency : public std::enable_shared_from_this<LowLatency> {
 public:
  /// Collective. The runtime's layout has memory for it.
  explicit LowLatency(Runtime& runtime);

  /// Logs which ranks are masked since the last look, and a queue pair of this rank that failed. Cheap when there is
  /// nothing new. `at_end`: all ranks leave, which is no news.
  void log_masks(bool at_end = false);

  // With masks.
  /// The first half of low_latency_resume, by this rank alone: what it has begun is over.
  void begin_resume();
  /// The second, collective over `ranks`: all go on together, also with processes whose buffers are new.
  void resume_together(Bootstrap& ranks);

  std::string describe() const;

 private:
  friend class Buffer;

  /// The scope of a call. Throws what an earlier call met, and logs which ranks it masked. A call that receives at once
  /// comes after those that wait for their hooks; one with a hook needs a place, and ends in no other way.
  CallScope begin(LowLatencyKind kind, bool hook, const CallOptions& call);
  /// Enqueues the first part of a call and finishes the scope. If a hook enqueues the other part, it is set in the
  /// result; until then the kernel's memory is kept: that of the result, and `used`.
  template <class Params, class Result, class... Used>
  void launch(LowLatencyKind kind, const LowLatencyPlan<Params>& plan, CallScope& scope, StreamHandle caller_stream,
              Result& result, const Used&... used) {
    plan.enqueue(plan.first, runtime_, scope);
    scope.begins();
    if (plan.receive) {
      auto enqueue = [this, plan, kept = std::tuple(result, used...)](const CallScope& of_hook) {
        plan.enqueue(*plan.receive, runtime_, of_hook);
      };
      waiting(kind).parts.push_back({caller_stream, scope.recording(), std::move(enqueue)});
    }
    result.event = plan.receive ? finish_send(kind, scope, result.hook) : scope.finish();
  }
  EventHandle finish_send(LowLatencyKind kind, CallScope& scope, std::function<void()>& hook);
  /// Enqueues the first `number` of all that have waited, but those that are gone: each as a call of its own. `done`
  /// gets them: what they hold may be the last owner of anything, the buffer included.
  void receive(WaitingParts& of_kind, std::uint64_t number, std::vector<WaitingParts::Part>& done);
  /// The same in a call of the buffer, which its caller owns.
  void receive(WaitingParts& of_kind, std::uint64_t number) {
    std::vector<WaitingParts::Part> done;
    receive(of_kind, number, done);
  }
  WaitingParts& waiting(LowLatencyKind kind) { return waiting_[static_cast<std::size_t>(kind)]; }
  // Ranks that calls leave out: those that the control plane calls lost, and those that the program masks, in the order
  // of calls. The program's masks are apart from verdicts, and undo none. They are in ControlState, for kernels.
  bool masks() const { return runtime_.options().low_latency.masking; }
  void launch_masks(LowLatencyMasksStep step, int rank, std::int32_t* status, StreamHandle stream);
  /// From here on all ranks have made so many calls of each kind, and barriers.
  std::uint64_t count_together(Bootstrap& ranks);
  /// After all ranks have ended their work: new queue pairs, and all that was told over the old ones as it would be
  /// after so many calls.
  void reconnect(Bootstrap& ranks, std::uint64_t calls);

  Runtime& runtime_;
  std::shared_ptr<LowLatencyState> state_;    ///< device memory
  rdma::Connections* connections_ = nullptr;  ///< null where no rank is reached by RDMA
  LowLatencySetup setup_;
  bool shown_ = false;      ///< has the program been given the memory of calls? It may write there
  std::size_t logged_ = 0;  ///< verdicts
  std::uint32_t seen_ = 0;  ///< the value of ControlWords::changes before the last look at verdicts
  std::array<WaitingParts, kLowLatencyKinds> waiting_ = {
      {{.call = "low_latency_dispatch"}, {.call = "low_latency_combine"}}};
};

}  // namespace deep_ep
