#include "csrc/buffer/call_scope.hpp"

#include <algorithm>
#include <iterator>
#include <thread>

#include "csrc/buffer/checks.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/program_code.hpp"
#include "deep_ep/interrupt.hpp"
#include "kernels/common/limits.hpp"

namespace deep_ep {
void CallContext::settle() const {
  if (const EventHandle latest = home->latest_for(comm_stream)) executor->wait_event(comm_stream, latest);
  if (!executor->is_capturing(comm_stream)) {
    const EventHandle end = executor->record_event(comm_stream);
    const Deadline deadline(settle_s);
    for (const Backoff backoff; !executor->event_done(end); std::this_thread::sleep_for(backoff.nap())) {
      if (InterruptScope::wanted()) throw Interrupted("a wait for this rank's work was interrupted");
      if (!deadline.expired()) continue;
      settle_soon();
      fail<TimeoutError>(
          "the work of this rank has not ended within {} s: earlier work on the stream has not ended, or the GPU is "
          "lost",
          deadline.seconds());
    }
  }
  executor->synchronize(comm_stream);  // what has failed there
}

void CallScope::begins() const {
  if (recording() || std::exchange(begun_, true) || context_.num_calls == nullptr) return;
  __atomic_store_n(context_.num_calls, *context_.num_calls + 1, __ATOMIC_RELAXED);
}

CallScope::CallScope(const CallContext& context, const CallOptions& call, bool always_event)
    : context_(context),
      device_(*context.executor),
      caller_stream_(call.stream),
      stream_(call.stream),
      async_finish_(call.async_finish),
      after_caller_(call.previous_event == nullptr),
      always_event_(always_event) {
  Executor& executor = *context_.executor;
  check_stream(executor.device(), "stream", call.stream);
  // A call that the caller's stream waits for anyway runs there: going to another stream and back costs microseconds.
  // In a recording it costs nothing, and the communication stream is what orders the calls of a graph.
  const bool in_place = !call.async_finish && !call.previous_event && !executor.is_capturing(call.stream);
  if (!in_place) stream_ = context_.comm_stream;
  if (call.previous_event) {
    executor.wait_event(stream_, call.previous_event);
  } else if (call.stream != stream_) {
    executor.wait_event(stream_, executor.record_event(call.stream));
  }
  if (call.also_after) executor.wait_event(stream_, call.also_after);
  // After the wait, which is what makes the stream a part of the recording.
  if (!in_place) graph_ = executor.capture_id(stream_);
  HomeStream& home = *context_.home;
  if (!recording()) {
    if (const EventHandle latest = home.latest_for(stream_)) executor.wait_event(stream_, latest);
  }
  home.works_on(stream_);
}

std::vector<Tensor> CallScope::tensors(std::span<const TensorView> wanted, bool in_heap) const {
  if (in_heap && recording()) return {};  // the graph would have the memory for good, and the heap is for all calls
  const auto aligned = [](const TensorView& view) { return align_up(view.bytes(), Arena::kAlignment); };
  std::size_t bytes = 0;
  for (const TensorView& view : wanted) bytes += aligned(view);
  const auto storage = in_heap ? allocate_in_arena(context_.arena, bytes, context_.home)
                               : allocate_in_pool(context_.cache, bytes, graph_);
  if (!storage) return {};
  std::vector<Tensor> made;
  made.reserve(wanted.size());
  std::byte* at = storage->data();
  for (TensorView view : wanted) {
    view.data = at;
    at += aligned(view);
    made.emplace_back(view, storage);
  }
  return made;
}

namespace {

/// Kernels write them as they were asked for.
void check_made(std::span<const TensorView> wanted, std::span<const Tensor> made) {
  if (made.size() != wanted.size()) {
    fail<InvalidArgument>("ResultTensors::make returned {} tensors, allowed: {}", made.size(), wanted.size());
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const TensorView &want = wanted[i], &came = made[i].view();
    bool fits = came.data != nullptr && came.dtype == want.dtype && came.device == want.device &&
                came.dims == want.dims && came.shape == want.shape;
    for (int dim = 0; fits && dim < want.dims; ++dim) {
      fits = want.size(dim) <= 1 || want.elements() == 0 || came.stride(dim) == want.stride(dim);
    }
    if (fits) continue;
    fail<InvalidArgument>("tensor {} that ResultTensors::make returned is {} on {}{}, allowed: {} on {}", i,
                          came.describe(), to_string(came.device), came.data == nullptr ? " without memory" : "",
                          want.describe(), to_string(want.device));
  }
}

}  // namespace

bool CallScope::make_results(const WantedTensors& wanted, bool in_heap, std::size_t of_handle) const {
  if (in_heap && recording()) return false;  // as above
  const std::span<const TensorView> all = wanted.views();
  std::vector<Tensor> made;
  if (context_.result_tensors != nullptr && !inside_) {
    const std::span<const TensorView> asked = all.first(all.size() - of_handle);
    // For the stream that the call comes after. Without async_finish the caller's stream waits for the call.
    const auto [stream, other] =
        after_caller_ ? std::pair(caller_stream_, stream_) : std::pair(stream_, caller_stream_);
    ResultTensors::Order order{.stream = stream};
    if (stream != other && (!after_caller_ || async_finish_)) order.other = other;
    {
      const ProgramCode allocates;
      made = context_.result_tensors->make(asked, order, in_heap ? context_.arena : nullptr);
    }
    if (in_heap && made.empty()) return false;
    check_made(asked, made);
    const auto outside = [&](const Tensor& tensor) { return !context_.arena->contains(tensor.data()); };
    if (in_heap && std::ranges::any_of(made, outside)) return false;
    Executor& executor = *context_.executor;
    executor.make_current();  // a framework may have run anything, the end of another buffer, too
    if (order.stream != stream_) executor.wait_event(stream_, executor.record_event(order.stream));
  }
  while (made.size() != all.size()) {
    std::vector<Tensor> piece = tensors(wanted.piece_from(made.size()), in_heap);
    if (piece.empty()) return false;
    if (!inside_) hand_out({&piece.front()});  // they share their memory
    std::ranges::move(piece, std::back_inserter(made));
  }
  wanted.place(std::move(made));
  return true;
}

void CallScope::hand_out(std::initializer_list<const Tensor*> tensors) const {
  for (const Tensor* tensor : tensors) {
    // Those of a framework need nothing; a caller may have put together a handle with others.
    auto* const ours = dynamic_cast<StreamStorage*>(tensor->storage().get());
    ours != nullptr ? ours->record_stream(caller_stream_, graph_) : tensor->record_stream(caller_stream_);
  }
}

EventHandle CallScope::end(bool joins) {
  EventHandle done = stream_ == nullptr && !always_event_ ? kDefaultStream : context_.executor->record_event(stream_);
  if (joins && caller_stream_ != stream_) context_.executor->wait_event(caller_stream_, done);
  if (!recording()) context_.home->work_ends(done);
  ended_ = true;
  return done;
}

EventHandle CallScope::finish() {
  begun_ = false;  // all that others wait for is enqueued
  EventHandle done = end(!async_finish_);
  return async_finish_ ? done : EventHandle{};
}

/// Memory that only the call used goes back before, as it was declared behind the scope: in the order of the call's
/// stream.
CallScope::~CallScope() {
  const bool fails = begun_ && !ended_;
  abandon();
  if (fails && context_.end_begun_call) log::quietly(context_.end_begun_call);
  context_.home->works_on(context_.comm_stream);
}

void CallScope::abandon() noexcept {
  if (std::exchange(ended_, true)) return;
  // Nothing else can bring the communication stream back, and a recording with a loose end is invalid. Where the device
  // is lost there is no event.
  log::quietly([this] { end(recording()); });
}

}  // namespace deep_ep
