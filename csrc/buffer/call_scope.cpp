#include "csrc/buffer/call_scope.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "kernels/common/limits.hpp"

namespace deep_ep {
namespace {

std::size_t aligned_bytes(const TensorView& view) { return align_up(view.bytes(), Arena::kAlignment); }

std::size_t bytes_together(std::span<const TensorView> views) {
  std::size_t bytes = 0;
  for (const TensorView& view : views) bytes += aligned_bytes(view);
  return std::max<std::size_t>(bytes, 1);
}

/// The tensors one after the other.
std::vector<Tensor> lay_out(std::span<const TensorView> views, const std::shared_ptr<StreamStorage>& storage) {
  std::vector<Tensor> tensors;
  tensors.reserve(views.size());
  std::byte* at = storage->data();
  for (TensorView view : views) {
    view.data = at;
    at += aligned_bytes(view);
    tensors.emplace_back(view, storage);
  }
  return tensors;
}

}  // namespace

void CallContext::settle() const {
  if (const EventHandle latest = home->latest_for(comm_stream)) executor->wait_event(comm_stream, latest);
  executor->synchronize(comm_stream);
}

CallScope::CallScope(const CallContext& context, const CallOptions& call, bool always_event)
    : context_(context),
      caller_stream_(call.stream),
      stream_(call.stream),
      async_finish_(call.async_finish),
      after_caller_(call.previous_event == nullptr),
      always_event_(always_event) {
  Executor& executor = *context_.executor;
  executor.make_current();
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

std::vector<Tensor> CallScope::heap_tensors(std::span<const TensorView> wanted) const {
  if (recording()) return {};  // the graph would have the memory for good, and the heap is for all calls
  auto storage = allocate_in_arena(context_.arena, bytes_together(wanted), context_.home);
  if (!storage) return {};
  return lay_out(wanted, std::move(storage));
}

std::vector<Tensor> CallScope::pool_tensors(std::span<const TensorView> wanted) const {
  return lay_out(wanted, allocate_in_pool(context_.cache, bytes_together(wanted), graph_));
}

/// Memory is made for the stream that the call comes after.
ResultTensors::Order CallScope::result_order() const {
  const auto [stream, other] = after_caller_ ? std::pair(caller_stream_, stream_) : std::pair(stream_, caller_stream_);
  // Without async_finish the caller's stream waits for the call.
  if (stream == other || (after_caller_ && !async_finish_)) return {.stream = stream};
  return {.stream = stream, .other = other};
}

namespace {

/// Kernels write them as they were asked for.
void check_made(const char* function, std::span<const TensorView> wanted, std::span<const Tensor> made) {
  if (made.size() != wanted.size()) {
    fail<InvalidArgument>("ResultTensors::{} returned {} tensors, allowed: {}", function, made.size(), wanted.size());
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const TensorView& want = wanted[i];
    const TensorView& came = made[i].view();
    bool fits =
        came.data != nullptr && came.dtype == want.dtype && came.device == want.device && came.dims == want.dims;
    for (int dim = 0; fits && dim < want.dims; ++dim) {
      const bool steps = want.size(dim) > 1 && want.elements() != 0;
      fits = came.size(dim) == want.size(dim) && (!steps || came.stride(dim) == want.stride(dim));
    }
    if (fits) continue;
    const auto describe = [](const TensorView& view) {
      return fmt::format("{} on {}{}", view.describe(), to_string(view.device),
                         view.data == nullptr ? " without memory" : "");
    };
    TensorView placed = want;
    placed.data = &placed;
    fail<InvalidArgument>("tensor {} that ResultTensors::{} returned is {}, allowed: {}", i, function, describe(came),
                          describe(placed));
  }
}

}  // namespace

std::vector<Tensor> CallScope::of_framework(std::span<const TensorView> wanted, bool in_heap) const {
  const ResultTensors::Order order = result_order();
  std::vector<Tensor> made = in_heap ? context_.result_tensors->make_in_heap(wanted, order, context_.arena)
                                     : context_.result_tensors->make(wanted, order);
  if (in_heap && made.empty()) return made;
  check_made(in_heap ? "make_in_heap" : "make", wanted, made);
  const auto outside = [&](const Tensor& tensor) { return !context_.arena->contains(tensor.data()); };
  if (in_heap && std::ranges::any_of(made, outside)) return {};
  Executor& executor = *context_.executor;
  executor.make_current();  // a framework may have run anything, the end of another buffer, too
  if (order.stream != stream_) executor.wait_event(stream_, executor.record_event(order.stream));
  return made;
}

std::vector<Tensor> CallScope::results(Pieces wanted, bool in_heap, std::size_t of_handle) const {
  if (in_heap && recording()) return {};  // as above
  std::vector<Tensor> made;
  const auto add = [&](std::span<const TensorView> piece) {
    if (piece.empty()) return true;
    std::vector<Tensor> tensors = in_heap ? heap_tensors(piece) : pool_tensors(piece);
    if (tensors.empty()) return false;
    if (!inside_) hand_out(tensors.front());  // they share their memory
    std::ranges::move(tensors, std::back_inserter(made));
    return true;
  };
  if (context_.result_tensors == nullptr || inside_) {
    if (!std::ranges::all_of(wanted, add)) made.clear();
    return made;
  }
  std::vector<TensorView> all;
  for (const std::vector<TensorView>& piece : wanted) all.insert(all.end(), piece.begin(), piece.end());
  made = of_framework(std::span(all).first(all.size() - of_handle), in_heap);
  add(std::span(all).last(of_handle));
  return made;
}

void CallScope::hand_out(const Tensor& tensor) const {
  // Those of a framework need nothing; a caller may have put together a handle with others.
  if (auto* ours = dynamic_cast<StreamStorage*>(tensor.storage().get())) {
    ours->record_stream(caller_stream_, graph_);
  } else {
    tensor.record_stream(caller_stream_);
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
  EventHandle done = end(!async_finish_);
  return async_finish_ ? done : EventHandle{};
}

/// Memory that only the call used goes back before, as it was declared behind the scope: in the order of the call's
/// stream.
CallScope::~CallScope() {
  abandon();
  context_.home->works_on(context_.comm_stream);
}

void CallScope::abandon() noexcept {
  if (std::exchange(ended_, true)) return;
  // Nothing else can bring the communication stream back, and a recording with a loose end is invalid. Where the device
  // is lost there is no event.
  log::quietly([this] { end(recording()); });
}

}  // namespace deep_ep
