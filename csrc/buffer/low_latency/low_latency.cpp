#include "csrc/buffer/low_latency/low_latency.hpp"

#include <algorithm>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/faults.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

LowLatency::LowLatency(Runtime& runtime) : runtime_(runtime) {
  const LowLatencyReach& reach = setup_.reach = runtime.plan().reach;
  state_ = runtime.zeroed_memory<LowLatencyState>();
  setup_.device = runtime.device();
  setup_.policy = runtime.policy();
  setup_.max_local_experts =
      std::min(runtime.options().max_local_experts, kMostLowLatencyExperts / runtime.num_ranks());
  LowLatencyParams& common = setup_.common;
  common.rank = runtime.rank();
  common.num_ranks = runtime.num_ranks();
  common.local = runtime.heap()->local();
  common.heaps = runtime.heap()->device_peers();
  common.window = runtime.layout().low_latency;
  common.node_width = reach.node_width;
  setup_.rest_bits = rest_bits_of(runtime.options().low_latency.sums);
  common.state = state_.get();
  common.wait = runtime.faults().wait_context(true);
  if (masks()) {
    common.wait.timeout_ns = kMostTimeouts * timeout_ns(runtime.timeout_s());
    common.mask = runtime.faults().control()->mask;
  }
  common.lets_next_start = environment::text("DEEP_EP_PROGRAMMATIC_LAUNCH") == "on";
  common.posts = common.wait;
  common.posts.spares_call = common.mask != nullptr;
  if (reach.far.empty()) return;
  connections_ = &runtime.connections(BufferPlan::kLowLatency);
  setup_.nic_bytes_per_ns = connections_->bytes_per_ns();
  common.peers = connections_->device_peers();
  common.lanes = runtime.options().low_latency.lanes;
  for (const int far : reach.far) common.set_far(far);
}

CallScope LowLatency::begin(LowLatencyKind kind, bool hook, const CallOptions& call) {
  if (hook && call.async_finish) {
    throw InvalidArgument("return_recv_hook and async_finish are both true, allowed: at most one of them");
  }
  runtime_.faults().raise();
  log_masks();
  WaitingParts& of_kind = waiting(kind);
  if (!hook) receive(of_kind, of_kind.end());
  if (of_kind.parts.size() >= WaitingParts::kMost) {
    fail<InvalidArgument>(
        "{}: {} calls with return_recv_hook still wait for their hooks, at most {} may; call one first", of_kind.call,
        of_kind.parts.size(), WaitingParts::kMost);
  }
  return CallScope(runtime_.calls(), call, false);
}

void LowLatency::receive(WaitingParts& of_kind, std::uint64_t number, std::vector<WaitingParts::Part>& done) {
  while (of_kind.gone < number) {
    WaitingParts::Part& part = of_kind.parts.front();
    if (runtime_.executor()->is_capturing(part.stream) != part.recorded) {
      fail<InvalidArgument>("{}: its send part was {} into a graph, so its receive part must be, too: call the hook {}",
                            of_kind.call, part.recorded ? "recorded" : "not recorded",
                            part.recorded ? "before the recording ends" : "before the recording begins");
    }
    CallScope scope(runtime_.calls(), {.stream = part.stream});
    part.enqueue(scope);
    done.push_back(std::move(part));
    of_kind.parts.pop_front();  // a hook that fails from here on may come again, but the part must not
    ++of_kind.gone;
    scope.finish();
  }
}

EventHandle LowLatency::finish_send(LowLatencyKind kind, CallScope& scope, std::function<void()>& hook) {
  hook = [buffer = weak_from_this(), kind, number = waiting(kind).end()] {
    std::vector<WaitingParts::Part> done;  // goes last: it may own the buffer
    const auto alive = buffer.lock();
    if (!alive) throw UseAfterDestroy("the hook of a low-latency call after the buffer's destroy");
    check_home(alive->runtime_, "a hook of low-latency calls");
    const BufferCall use(alive->runtime_, "a hook of low-latency calls");
    alive->receive(alive->waiting(kind), number, done);
  };
  try {
    return scope.finish();
  } catch (...) {
    // The send part is on its way, so the receive part must follow for ranks to go on counting calls alike; but the
    // caller gets no hook.
    scope.abandon();
    log::quietly(hook);
    throw;
  }
}

std::string LowLatency::describe() const {
  const LowLatencyWindow& window = runtime_.layout().low_latency;
  const LowLatencyReach& reach = setup_.reach;
  std::string text = fmt::format(
      "low latency: room for {} tokens and {} of rows from each rank ({} for combine), sums travel in {} bits, late "
      "ranks are {}, ",
      window.slots, format_bytes(window.source_bytes[0]), format_bytes(window.source_bytes[1]), 16 + setup_.rest_bits,
      masks() ? "masked" : "errors");
  if (reach.far.empty()) return text + "NVLink reaches every rank, not by rails, " + reach.why_no_rails;
  text += fmt::format("{} of {} ranks are reached by RDMA, ", reach.far.size(), runtime_.num_ranks());
  text += reach.rail_width == 0 ? fmt::format("not by rails, {}", reach.why_no_rails)
                                : fmt::format("by rails between nodes of {} ranks {}", reach.rail_width,
                                              reach.rails_always ? "always" : "where they pay");
  return text + ": " + connections_->describe();
}

TensorView Buffer::low_latency_memory() const {
  const BufferCall in(runtime_, "low_latency_memory");
  LowLatency& mode = in.low_latency();
  mode.shown_ = true;
  const LowLatencyWindow& window = in->layout().low_latency;
  return TensorView::contiguous(window.of_calls().in(in->heap()->local()), DType::uint8,
                                {static_cast<std::int64_t>(window.bytes_of_calls())}, in->device());
}

void LowLatency::log_masks(bool at_end) {
  // The control thread keeps a verdict before it moves the word, so a verdict that is missed here moves it again.
  const std::uint32_t changes = __atomic_load_n(&runtime_.control_words().changes, __ATOMIC_ACQUIRE);
  if (!masks() || std::exchange(seen_, changes) == changes) return;
  const control::Membership& membership = *runtime_.membership();
  const std::vector<control::LostRank> lost = membership.lost();
  for (; logged_ < lost.size(); ++logged_) {
    if (at_end && lost[logged_].why == control::LostWhy::left) continue;
    log::warn("{}", describe_masking(lost[logged_], membership.describe_end(lost[logged_].rank)));
    const std::string failure = runtime_.faults().describe_failure(lost[logged_].rank);
    if (!failure.empty()) log::warn("{}", failure);
  }
}

void LowLatency::launch_masks(LowLatencyMasksStep step, int rank, std::int32_t* status, StreamHandle stream) {
  CallScope scope(runtime_.calls(), {.stream = stream});
  const LowLatencyMasksParams params{.wait = setup_.common.wait, .step = step, .rank = rank, .status = status};
  runtime_.launch(choices::masks_low_latency, params, {1, 128}, scope);
  scope.finish();
}

void Buffer::low_latency_update_mask(int rank, bool masked, StreamHandle stream) {
  const BufferCall in(runtime_, "low_latency_update_mask");
  LowLatency& mode = in.masking();
  check_range("rank", rank, 0, in->num_ranks() - 1);
  if (!masked) in->faults().raise();  // a rank that has been told that it is masked cannot undo that
  in->membership()->leave_out(rank, masked);
  mode.launch_masks(masked ? LowLatencyMasksStep::mask : LowLatencyMasksStep::unmask, rank, nullptr, stream);
}

void Buffer::low_latency_query_mask(const TensorView& status, StreamHandle stream) {
  const BufferCall in(runtime_, "low_latency_query_mask");
  LowLatency& mode = in.masking();
  check_tensor("status", status, in->device(), {DType::int32}, {in->num_ranks()});
  mode.launch_masks(LowLatencyMasksStep::query, -1, status.as<std::int32_t>(), stream);
}

void Buffer::low_latency_clear_mask(StreamHandle stream) {
  const BufferCall in(runtime_, "low_latency_clear_mask");
  LowLatency& mode = in.masking();
  in->faults().raise();
  for (int rank = 0; rank < in->num_ranks(); ++rank) in->membership()->leave_out(rank, false);
  mode.launch_masks(LowLatencyMasksStep::unmask, -1, nullptr, stream);
}

void Buffer::low_latency_clean(StreamHandle stream) {
  const BufferCall in(runtime_, "low_latency_clean");
  LowLatency& mode = in.low_latency();
  in->faults().raise();
  mode.log_masks();
  if (mode.shown_) {  // what waits for its hook lies in the memory that is cleaned
    for (WaitingParts& of_kind : mode.waiting_) mode.receive(of_kind, of_kind.end());
  }
  CallScope scope(in->calls(), {.stream = stream});
  const auto barrier = [&] { in->launch(choices::barrier_low_latency, mode.setup_.common, {1, 64}, scope); };
  // Memory is cleaned behind a barrier, as peers may still write what this rank did not wait for (selections of tokens
  // that have no expert here), and before another one, behind which they send rows of later calls. Every rank
  // makes both, also if its program has not asked for the memory.
  barrier();
  scope.begins();
  if (mode.shown_) {
    const LowLatencyWindow& window = mode.setup_.common.window;
    in->executor()->fill(window.of_calls().in(mode.setup_.common.local), 0, window.bytes_of_calls(), scope.stream());
  }
  barrier();
  scope.finish();
}

std::uint64_t LowLatency::count_together(Bootstrap& ranks) {
  // Everybody goes on from the largest count, so that no signal of an earlier call can be taken for a later one's. A
  // rank that has died took its count along; it may have sent rows of two more calls.
  constexpr std::uint64_t kMostAhead = 2;
  Executor& executor = *runtime_.executor();
  LowLatencyState state;
  copy_now(executor, &state, state_.get(), sizeof state);
  std::uint64_t calls = state.barriers.calls;
  for (const LowLatencyCounters& of : state.counters)
    calls = std::max({calls, Progress::call_of(of.sent), Progress::call_of(of.received)});
  for (const std::uint64_t theirs : all_gather_values(ranks, calls)) calls = std::max(calls, theirs);
  calls += kMostAhead;
  for (LowLatencyCounters& of : state.counters) of.sent = of.received = Progress::at(calls);
  state.barriers.calls = calls;
  copy_now(executor, state_.get(), &state, sizeof state);
  return calls;
}

void LowLatency::begin_resume() {
  const DeviceScope device(*runtime_.executor());
  runtime_.calls().settle();
  runtime_.faults().come_back();
  log_masks();
}

void Buffer::low_latency_resume() {
  const BufferCall in(runtime_, "low_latency_resume");
  LowLatency& mode = in.masking();
  BufferExchanges& exchanges = in->bootstrap();
  exchanges.begin(Purpose::resuming);
  try {
    exchanges.agree("low_latency_resume", [&] {
      mode.begin_resume();
      mode.resume_together(exchanges);
    });
  } catch (const PeerLeft& left) {
    in->faults().break_later_calls<SystemError>(left.what());
    throw;
  }
}

void LowLatency::resume_together(Bootstrap& ranks) {
  const std::uint64_t calls = count_together(ranks);  // throws before anything has changed
  for (WaitingParts& of_kind : waiting_) {            // receive parts that no hook has enqueued
    of_kind.gone = of_kind.end();
    of_kind.parts.clear();
  }
  if (connections_) reconnect(ranks, calls);
  runtime_.membership()->resume();
  logged_ = 0;
  runtime_.faults().forget_verdicts();
  ranks.barrier();
}

void LowLatency::reconnect(Bootstrap& ranks, std::uint64_t calls) try {
  connections_->reconnect(ranks);  // what was under way is lost: nobody adds any more
  LowLatencyMailbox told;
  std::ranges::fill(told.word, Progress::at(calls));
  told.word[LowLatencyMailbox::kAcknowledged] = told.word[LowLatencyMailbox::kBarrier] = calls;

  // Both ends of every word: what this rank has told, and what it has been told.
  Executor& executor = *runtime_.executor();
  for (const int far : setup_.reach.far) {
    for (const LowLatencyKind kind : {LowLatencyKind::dispatch, LowLatencyKind::combine}) {
      const LowLatencyWindow& window = setup_.common.window;
      for (const Place<std::uint64_t> end : {window.told(kind, far, 0), window.word(kind, far, 0)}) {
        executor.copy(end.in(setup_.common.local), &told, sizeof told, runtime_.comm_stream());
      }
    }
  }
  executor.synchronize(runtime_.comm_stream());
} catch (const Error& error) {
  // The old queue pairs are gone, and kernels would write where they were.
  runtime_.faults().break_later_calls<SystemError>(
      fmt::format("low_latency_resume made no new RDMA connections: {}", error.what()));
  throw;
}

}  // namespace deep_ep
