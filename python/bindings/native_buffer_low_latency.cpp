// The low-latency calls of NativeBuffer.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "deep_ep/error.hpp"
#include "python/bindings/framework.hpp"
#include "python/bindings/native_buffer.hpp"

namespace deep_ep::bindings {
namespace {

constexpr std::size_t kLength = 5;  // src_info, layout_range, M, H, E

std::int64_t number(const py::tuple& handle, std::size_t index) {
  if (!py::isinstance<py::int_>(handle[index])) {
    throw py::type_error(fmt::format("handle[{}] is of type {}, expected an int", index,
                                     Py_TYPE(py::object(handle[index]).ptr())->tp_name));
  }
  return handle[index].cast<std::int64_t>();
}

void require_same(std::size_t index, std::int64_t given, std::int64_t dispatched) {
  if (given == dispatched) return;
  throw InvalidArgument(fmt::format("handle[{}] is {}, but the dispatch had {}", index, given, dispatched));
}

/// The expert's rows lie in the combine buffer already; x only has to look like them.
void check_zero_copy(const ConstTensorView& x, const TensorView& buffer) {
  bool same = x.dims == buffer.dims && x.dtype == buffer.dtype;
  for (int dim = 0; same && dim < x.dims; ++dim) same = x.size(dim) == buffer.size(dim);
  if (same) return;
  throw InvalidArgument(fmt::format("x is {}, expected {}: with zero_copy it must look like the combine buffer",
                                    x.describe(), buffer.describe()));
}

/// The arguments of a call, for a receive part that waits for its hook.
std::shared_ptr<void> owner_of(const py::args& given, const std::shared_ptr<Leftovers>& leftovers) {
  return {py::object(given).release().ptr(),
          [leftovers](void* object) { Leftovers::add(leftovers, static_cast<PyObject*>(object)); }};
}

template <class Number>
std::vector<Number> numbers_of(const py::object& list) {
  std::vector<Number> numbers;
  for (const py::handle number : list) numbers.push_back(number.cast<Number>());
  return numbers;
}

}  // namespace

/// The memory of src_info, as the framework holds it.
class LowLatencyHandles::Keeper final : public Tensor::Storage {
 public:
  explicit Keeper(LowLatencyHandle handle) : handle_(std::move(handle)) {}
  /// The handle's tensors share their memory.
  void record_stream(StreamHandle stream) override { handle_.src_info.record_stream(stream); }
  bool knows_stream(StreamHandle stream) const override { return handle_.src_info.storage()->knows_stream(stream); }
  const LowLatencyHandle& handle() const { return handle_; }
  std::optional<TensorView> combine_buffer;

 private:
  LowLatencyHandle handle_;
};

py::tuple LowLatencyHandles::hand_out(const LowLatencyHandle& handle) {
  const auto keeper = std::make_shared<Keeper>(handle);
  by_address_.insert_or_assign(handle.src_info.data(), keeper);
  if (by_address_.size() > tidy_at_) {
    std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
    tidy_at_ = std::max<std::size_t>(64, 2 * by_address_.size());
  }
  const Framework& framework = Framework::instance();
  return py::make_tuple(framework.hand_out(Tensor(handle.src_info.view(), keeper)),
                        framework.hand_out(handle.layout_range), handle.max_tokens, handle.hidden, handle.num_experts);
}

std::shared_ptr<LowLatencyHandles::Keeper> LowLatencyHandles::keeper(const py::tuple& handle) const {
  const auto entry = by_address_.find(Framework::instance().borrow(handle[0], "handle[0]").view.data);
  return entry == by_address_.end() ? nullptr : entry->second.lock();
}

void LowLatencyHandles::remember_combine_buffer(const py::tuple& handle, const TensorView& rows) {
  keeper(handle)->combine_buffer = rows;
}

std::optional<TensorView> LowLatencyHandles::combine_buffer(const py::tuple& handle) const {
  return keeper(handle)->combine_buffer;
}

LowLatencyHandle LowLatencyHandles::find(const py::tuple& handle) const {
  if (handle.size() != kLength) {
    throw InvalidArgument(
        fmt::format("handle has {} elements, expected the tuple of {} that low_latency_dispatch "
                    "returned",
                    handle.size(), kLength));
  }
  const std::shared_ptr<Keeper> kept = keeper(handle);
  if (!kept) {
    const TensorView src_info = Framework::instance().borrow(handle[0], "handle[0]").view;
    throw InvalidArgument(
        fmt::format("handle[0] is {}, but not the tensor that this buffer's low_latency_dispatch "
                    "returned (a copy does not do: combine needs what lies behind it)",
                    src_info.describe()));
  }
  LowLatencyHandle result = kept->handle();
  require_same(2, number(handle, 2), result.max_tokens);
  result.hidden = number(handle, 3);
  require_same(4, number(handle, 4), result.num_experts);
  return result;
}

void NativeBuffer::settle_on_cpu() {
  try {
    executor_->synchronize(nullptr);
  } catch (const Interrupted&) {
    // The check that follows ends the call.
  }
}

py::object NativeBuffer::hook_object(std::function<void()> receive) {
  if (!receive) return py::none();
  return py::cast(ReceiveHook([self = shared_from_this(), receive = std::move(receive)] {
    self->alive();  // the buffer may have been destroyed since the send part
    self->on_stream([&] { receive(); });
  }));
}

py::tuple NativeBuffer::low_latency_dispatch(LowLatencyDispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  // Python's calls are more generous than C++'s: what upstream ignores, or has on by default, is no mistake.
  if (call.arguments.use_nvfp4) call.arguments.use_fp8 = false;
  if (!call.arguments.use_fp8 && !call.arguments.use_nvfp4 && !call.arguments.use_ue8m0) {
    call.arguments.round_scale = false;
  }
  if (call.arguments.return_recv_hook) call.arguments.owner = owner_of(call.given, leftovers_);
  complete(call.options);
  LowLatencyDispatchResult result =
      on_stream([&] { return buffer.low_latency_dispatch(call.arguments, call.options); });
  low_latency_dispatches_.add(call.arguments.x.bytes());
  py::object rows = framework.hand_out(result.recv_x);
  if (result.recv_x_scales) rows = py::make_tuple(rows, framework.hand_out(*result.recv_x_scales));
  const py::object event = event_object(call.options, result.event, result.recv_x, result.recv_x_scales,
                                        result.recv_count, result.handle.src_info);
  return py::make_tuple(std::move(rows), framework.hand_out(result.recv_count), handles_.hand_out(result.handle), event,
                        hook_object(std::move(result.hook)));
}

py::tuple NativeBuffer::low_latency_combine(LowLatencyCombineCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  const LowLatencyHandle dispatched = handles_.find(call.handle);
  if (call.zero_copy) {
    if (call.arguments.use_logfmt) {
      throw InvalidArgument("zero_copy and use_logfmt are both true, allowed: at most one of them");
    }
    const TensorView rows = lent_for(call.handle, dispatched);
    check_zero_copy(call.arguments.x, rows);
    // A combine buffer that came has the rows, even if a larger one has taken its place since.
    if (!combine_buffers_.contains(call.arguments.x.data)) call.arguments.x = rows;
  }
  call.arguments.handle = &dispatched;
  if (call.arguments.return_recv_hook) call.arguments.owner = owner_of(call.given, leftovers_);
  if (call.out) call.arguments.out = call.out->view;
  if (call.overlaps) call.arguments.overlap = call.overlap;
  complete(call.options);
  LowLatencyCombineResult result = on_stream([&] { return buffer.low_latency_combine(call.arguments, call.options); });
  low_latency_combines_.add(result.combined_x.view().bytes());
  const py::object combined =
      call.out ? py::reinterpret_borrow<py::object>(call.out->object) : framework.hand_out(result.combined_x);
  return py::make_tuple(combined, event_object(call.options, result.event, result.combined_x),
                        hook_object(std::move(result.hook)));
}

py::object NativeBuffer::low_latency_combine_buffer(const py::tuple& handle) {
  const TensorView rows = alive().low_latency_combine_buffer(handles_.find(handle));
  combine_buffers_.insert(rows.data);
  handles_.remember_combine_buffer(handle, rows);
  return lend(rows);
}

TensorView NativeBuffer::lent_for(const py::tuple& handle, const LowLatencyHandle& dispatched) {
  const std::optional<TensorView> lent = handles_.combine_buffer(handle);
  return lent && lent->size(2) == dispatched.hidden ? *lent : alive().low_latency_combine_buffer(dispatched);
}

py::object NativeBuffer::low_latency_memory() const { return lend(alive().low_latency_memory()); }

void NativeBuffer::low_latency_clean() {
  Buffer& buffer = alive();
  const StreamHandle stream = Framework::instance().current_stream(device_);
  on_stream([&] { buffer.low_latency_clean(stream); });
}

py::tuple NativeBuffer::low_latency_stats(bool reset, bool stop) {
  Buffer& buffer = alive();
  const StreamHandle stream = Framework::instance().current_stream(device_);
  const LowLatencyStatsThen then = stop    ? LowLatencyStatsThen::stop
                                   : reset ? LowLatencyStatsThen::reset
                                           : LowLatencyStatsThen::go_on;
  const LowLatencyStats stats = without_gil([&] { return buffer.low_latency_stats(then, stream); });
  const auto& [rank, dispatch, combine] = stats;
  return py::make_tuple(rank, list_of(dispatch.calls), list_of(dispatch.total_us), list_of(dispatch.longest_us),
                        list_of(combine.calls), list_of(combine.total_us), list_of(combine.longest_us));
}

py::tuple find_late_ranks(const py::tuple& of_ranks, double threshold_us) {
  std::vector<LowLatencyStats> all;
  for (const py::handle of : of_ranks) {
    const auto stats = py::reinterpret_borrow<py::tuple>(of);
    const auto calls = [&](std::size_t i) { return numbers_of<std::uint64_t>(stats[i]); };
    const auto us = [&](std::size_t i) { return numbers_of<double>(stats[i]); };
    all.push_back({.rank = stats[0].cast<int>(),
                   .dispatch = {.calls = calls(1), .total_us = us(2), .longest_us = us(3)},
                   .combine = {.calls = calls(4), .total_us = us(5), .longest_us = us(6)}});
  }
  const LowLatencyVerdict verdict = deep_ep::find_late_ranks(all, threshold_us);
  return py::make_tuple(list_of(verdict.late), list_of(verdict.waited_us), verdict.text);
}

void NativeBuffer::low_latency_update_mask(int rank, bool masked) {
  Buffer& buffer = alive();
  const StreamHandle stream = Framework::instance().current_stream(device_);
  on_stream([&] { buffer.low_latency_update_mask(rank, masked, stream); });
}

void NativeBuffer::low_latency_query_mask(py::handle mask_status) {
  Buffer& buffer = alive();
  const StreamHandle stream = Framework::instance().current_stream(device_);
  const TensorView status = Framework::instance().borrow(mask_status, "mask_status").view;
  on_stream([&] { buffer.low_latency_query_mask(status, stream); });
}

void NativeBuffer::low_latency_clear_mask() {
  Buffer& buffer = alive();
  const StreamHandle stream = Framework::instance().current_stream(device_);
  on_stream([&] { buffer.low_latency_clear_mask(stream); });
}

void NativeBuffer::low_latency_resume() {
  Buffer& buffer = alive();
  without_gil([&] { buffer.low_latency_resume(); });
}

}  // namespace deep_ep::bindings
