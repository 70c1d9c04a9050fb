// The low-latency calls of NativeBuffer.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "python/bindings/framework.hpp"
#include "python/bindings/native_buffer.hpp"

namespace deep_ep::bindings {
namespace {

std::optional<TensorView> optional_view(py::handle object, const char* name) {
  if (const auto argument = Framework::instance().borrow_optional(object, name)) return argument->view;
  return std::nullopt;
}

/// The expert's rows lie in the combine buffer already; x only has to look like them.
void check_zero_copy(const TensorView& x, const TensorView& buffer) {
  bool same = x.dims == buffer.dims && x.dtype == buffer.dtype;
  for (int dim = 0; same && dim < x.dims; ++dim) same = x.size(dim) == buffer.size(dim);
  if (same) return;
  throw InvalidArgument(fmt::format("x is {}, expected {}: with zero_copy it must look like the combine buffer",
                                    x.describe(), buffer.describe()));
}

}  // namespace

CallOptions NativeBuffer::low_latency_options(const LowLatencyEnd& end) const {
  if (end.async_finish && end.return_recv_hook) {
    throw InvalidArgument("async_finish and return_recv_hook are both true, allowed: at most one of them");
  }
  CallOptions options;
  options.stream = Framework::instance().current_stream(device_);
  options.async_finish = end.async_finish;
  options.return_recv_hook = end.return_recv_hook;
  return options;
}

void NativeBuffer::complete_on_cpu() {
  if (device_.kind != Device::Kind::cpu) return;
  executor_->synchronize(nullptr);
  alive().check();
}

template <class... Objects>
py::object NativeBuffer::hook_object(std::function<void()> receive, const Objects&... needed) {
  if (!receive) return py::none();
  return py::cast(ReceiveHook(
      [self = shared_from_this(), receive = std::move(receive)] {
        self->alive();  // the buffer may have been destroyed since the send part
        receive();
        self->complete_on_cpu();
      },
      py::make_tuple(needed...)));
}

py::tuple NativeBuffer::low_latency_dispatch(py::handle x, py::handle topk_idx, py::handle topk_weights, int max_tokens,
                                             int num_experts, py::handle cumulative_local_expert_recv_stats,
                                             py::handle wait_recv_cost_stats, const LowLatencyRowFormat& format,
                                             const LowLatencyEnd& end) {
  Buffer& buffer = alive();
  const CallOptions call = low_latency_options(end);
  const Framework& framework = Framework::instance();
  LowLatencyDispatchArguments arguments;
  arguments.x = framework.borrow(x, "x").view;
  arguments.topk_idx = framework.borrow(topk_idx, "topk_idx").view;
  arguments.topk_weights = optional_view(topk_weights, "topk_weights");
  arguments.max_tokens = max_tokens;
  arguments.num_experts = num_experts;
  arguments.use_fp8 = format.use_fp8;
  arguments.round_scale = format.round_scale;
  arguments.use_ue8m0 = format.use_ue8m0;
  arguments.layout = format.rank_major ? LowLatencyLayout::rank_major : LowLatencyLayout::expert_major;
  arguments.cumulative_local_expert_recv_stats =
      optional_view(cumulative_local_expert_recv_stats, "cumulative_local_expert_recv_stats");
  arguments.wait_recv_cost_stats = optional_view(wait_recv_cost_stats, "dispatch_wait_recv_cost_stats");
  LowLatencyDispatchResult result;
  {
    const py::gil_scoped_release released;
    result = buffer.low_latency_dispatch(arguments, call);
    complete_on_cpu();
  }
  py::object rows = framework.hand_out(result.recv_x);
  if (result.recv_x_scales) rows = py::make_tuple(rows, framework.hand_out(*result.recv_x_scales));
  const Tensor none;
  const py::object event =
      event_object({{}, end.async_finish}, result.event,
                   {&result.recv_x, result.recv_x_scales ? &*result.recv_x_scales : &none, &result.recv_count,
                    result.recv_topk_idx ? &*result.recv_topk_idx : &none,
                    result.recv_topk_weights ? &*result.recv_topk_weights : &none, &result.handle.src_info});
  return py::make_tuple(std::move(rows), framework.hand_out(result.recv_count),
                        framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights),
                        handles_.hand_out(result.handle), event,
                        hook_object(std::move(result.hook), x, topk_idx, topk_weights,
                                    cumulative_local_expert_recv_stats, wait_recv_cost_stats));
}

py::tuple NativeBuffer::low_latency_combine(py::handle x, py::handle topk_idx, py::handle topk_weights,
                                            const py::tuple& handle, bool use_logfmt, bool zero_copy, py::handle out,
                                            py::handle wait_recv_cost_stats, const LowLatencyEnd& end) {
  Buffer& buffer = alive();
  const CallOptions call = low_latency_options(end);
  const Framework& framework = Framework::instance();
  const LowLatencyHandle dispatched = handles_.find(handle);
  LowLatencyCombineArguments arguments;
  arguments.x = framework.borrow(x, "x").view;
  if (zero_copy) {
    if (use_logfmt) throw InvalidArgument("zero_copy and use_logfmt are both true, allowed: at most one of them");
    const TensorView rows = buffer.low_latency_combine_buffer(dispatched);
    check_zero_copy(arguments.x, rows);
    arguments.x = rows;
  }
  arguments.topk_idx = framework.borrow(topk_idx, "topk_idx").view;
  arguments.topk_weights = framework.borrow(topk_weights, "topk_weights").view;
  arguments.handle = &dispatched;
  arguments.use_logfmt = use_logfmt;
  arguments.out = optional_view(out, "out");
  arguments.wait_recv_cost_stats = optional_view(wait_recv_cost_stats, "combine_wait_recv_cost_stats");
  LowLatencyCombineResult result;
  {
    const py::gil_scoped_release released;
    result = buffer.low_latency_combine(arguments, call);
    complete_on_cpu();
  }
  py::object combined = arguments.out ? py::reinterpret_borrow<py::object>(out) : framework.hand_out(result.combined_x);
  const py::object event = event_object({{}, end.async_finish}, result.event, {&result.combined_x});
  return py::make_tuple(
      combined, event,
      hook_object(std::move(result.hook), x, topk_idx, topk_weights, handle, out, wait_recv_cost_stats));
}

py::object NativeBuffer::low_latency_combine_buffer(const py::tuple& handle) {
  return lend(alive().low_latency_combine_buffer(handles_.find(handle)));
}

py::object NativeBuffer::low_latency_memory() const { return lend(alive().low_latency_memory()); }

void NativeBuffer::low_latency_clean() {
  Buffer& buffer = alive();
  const CallOptions call = low_latency_options({});
  const py::gil_scoped_release released;
  buffer.low_latency_clean(call);
  complete_on_cpu();
}

void NativeBuffer::low_latency_update_mask(int rank, bool masked) {
  Buffer& buffer = alive();
  const CallOptions call = low_latency_options({});
  const py::gil_scoped_release released;
  buffer.low_latency_update_mask(rank, masked, call);
  complete_on_cpu();
}

void NativeBuffer::low_latency_query_mask(py::handle mask_status) {
  Buffer& buffer = alive();
  const CallOptions call = low_latency_options({});
  const TensorView status = Framework::instance().borrow(mask_status, "mask_status").view;
  const py::gil_scoped_release released;
  buffer.low_latency_query_mask(status, call);
  complete_on_cpu();
}

void NativeBuffer::low_latency_clear_mask() {
  Buffer& buffer = alive();
  const CallOptions call = low_latency_options({});
  const py::gil_scoped_release released;
  buffer.low_latency_clear_mask(call);
  complete_on_cpu();
}

void NativeBuffer::low_latency_resume() {
  Buffer& buffer = alive();
  const py::gil_scoped_release released;
  buffer.low_latency_resume();
}

}  // namespace deep_ep::bindings
