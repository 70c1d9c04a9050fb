// How calls of both kinds reach the executor.
#pragma once

#include <exception>
#include <utility>

#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

/// A call ends in one way.
inline void check_end(bool return_recv_hook, const CallOptions& call) {
  if (!return_recv_hook || !call.async_finish) return;
  throw InvalidArgument("return_recv_hook and async_finish are both true, allowed: at most one of them");
}

inline void take_part(const LowLatencyPart& part, LowLatencyDispatchParams& params) {
  params.phase = part.phase;
  params.common.working_blocks = part.working_blocks;
}

inline void take_part(const LowLatencyPart& part, LowLatencyCombineParams& params) {
  params.phase = part.phase;
  params.common.working_blocks = part.working_blocks;
  params.rows_of_group = part.rows_of_group;
  params.signals.selections = part.selections;
}

/// Enqueues the part that receives, with what measures it.
template <class Params>
void enqueue_receive(const KernelTable& kernels, const LowLatencyPlan<Params>& plan, StreamHandle stream) {
  Params params = plan.params;
  take_part(*plan.receive, params);
  if (plan.waits && plan.waits->listens) enqueue_waits(kernels, *plan.waits->listens, stream);
  (kernels.*plan.kernel)(params, plan.receive->shape, stream);
  if (plan.waits) enqueue_waits(kernels, plan.waits->adds, stream);
}

template <class Params, class Kept>
EventHandle LowLatency::launch(LowLatencyKind kind, LowLatencyPlan<Params>& plan, CallScope& scope,
                               StreamHandle caller_stream, Kept kept, std::function<void()>& hook) {
  take_part(plan.first, plan.params);
  const KernelTable& kernels = runtime_.executor()->kernels();
  (kernels.*plan.kernel)(plan.params, plan.first.shape, scope.stream());
  if (!plan.hooked) {
    if (plan.receive) {
      enqueue_receive(kernels, plan, scope.stream());
    } else if (plan.waits) {
      enqueue_waits(kernels, plan.waits->adds, scope.stream());
    }
    return scope.finish();
  }
  // The receive part is a call of its own, on the same stream, whenever the hook comes. A hook that failed may come
  // again, but the part must not.
  hook = queue(kind).add([this, kind, caller_stream, recorded = scope.recording(), plan = LowLatencyPlan<Params>(plan),
                          kept = std::move(kept), enqueued = false]() mutable {
    Backend& executor = *runtime_.executor();
    if (executor.is_capturing(caller_stream) != recorded) {
      fail<InvalidArgument>("{}: its send part was {} into a graph, so its receive part must be, too: call the hook {}",
                            kind == LowLatencyKind::dispatch ? "low_latency_dispatch" : "low_latency_combine",
                            recorded ? "recorded" : "not recorded",
                            recorded ? "before the recording ends" : "before the recording begins");
    }
    CallScope receiving(runtime_.calls(), {.stream = caller_stream});
    if (!enqueued) enqueue_receive(executor.kernels(), plan, receiving.stream());
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
