#include "python/bindings/native_buffer.hpp"

#include <fmt/format.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/error.hpp"
#include "python/bindings/framework.hpp"
#include "python/bindings/result_tensors.hpp"

namespace deep_ep::bindings {
namespace {

/// Places in the handle tuple. Between them lies upstream's bookkeeping, which nothing here needs.
struct HandleElements {
  std::size_t length, rank_prefix_matrix, recv_src_idx, destination_row;
  std::size_t node_row = 0, node_counts = 0, relay_rows = 0;  ///< 0: not there
};
constexpr HandleElements kInsideANode{.length = 6, .rank_prefix_matrix = 0, .recv_src_idx = 3, .destination_row = 5};
constexpr HandleElements kBetweenNodes{.length = 10,
                                       .rank_prefix_matrix = 5,
                                       .recv_src_idx = 7,
                                       .destination_row = 2,
                                       .node_row = 8,
                                       .node_counts = 1,
                                       .relay_rows = 9};

/// Borrowed for a call. The library's tensors are given back after the buffer's calls, and those of the framework are
/// recorded by the caller.
Tensor handle_tensor(const py::tuple& handle, std::size_t index, const Device& device, int dims) {
  const std::string name = fmt::format("handle[{}]", index);
  const TensorView view = Framework::instance().borrow(handle[index], name.c_str()).view;
  if (view.dtype != DType::int32 || view.dims != dims || !view.is_contiguous() || view.device != device) {
    throw InvalidArgument(
        fmt::format("{} is {} on {}, expected what dispatch returned: contiguous int32 of {} "
                    "dimensions on {}",
                    name, view.describe(), to_string(view.device), dims, to_string(device)));
  }
  return Tensor::borrow(view);
}

py::tuple hand_out_handle(const DispatchHandle& handle, py::handle is_token_in_rank) {
  const Framework& framework = Framework::instance();
  const py::object prefix = framework.hand_out(handle.rank_prefix_matrix);
  const py::object recv_src_idx = framework.hand_out(handle.recv_src_idx);
  const py::object destination_row = framework.hand_out(handle.destination_row);
  if (!handle.node_row.defined()) {
    return py::make_tuple(prefix, prefix, prefix, recv_src_idx, is_token_in_rank, destination_row);
  }
  const py::object node_counts = framework.hand_out(handle.node_counts);
  // The end of each source's rows on this rank is a column of the matrix: the caller puts it at index 6.
  return py::make_tuple(is_token_in_rank, node_counts, destination_row, node_counts, node_counts, prefix, prefix,
                        recv_src_idx, framework.hand_out(handle.node_row), framework.hand_out(handle.relay_rows));
}

/// Of the second interface.
py::tuple hand_out_route(const ElasticDispatchHandle& handle) {
  const Framework& framework = Framework::instance();
  if (handle.sent_to.defined()) return py::make_tuple(framework.hand_out(handle.sent_to));
  const DispatchHandle& route = handle.route;
  return py::make_tuple(framework.hand_out(route.rank_prefix_matrix), framework.hand_out(route.destination_row),
                        framework.hand_out(route.node_row), framework.hand_out(route.node_counts),
                        framework.hand_out(route.relay_rows));
}

}  // namespace

NativeBuffer::NativeBuffer(const BufferSetup& setup)
    : device_(setup.device < 0 ? Device{} : Device{Device::Kind::cuda, setup.device}),
      leftovers_(setup.device < 0 ? std::make_shared<Leftovers>() : nullptr) {
  BufferOptions options = setup.options;
  options.reject_unknown_experts = false;
  options.comm_stream = reinterpret_cast<StreamHandle>(setup.comm_stream);
  if (setup.device >= 0) options.result_allocator = Framework::instance().allocator();
  if (!setup.results.is_none()) options.result_tensors = std::make_shared<FrameworkResults>(setup.results, leftovers_);
  if (setup.timeout_s >= 0) options.timeout_s = setup.timeout_s;
  const py::gil_scoped_release released;
  executor_ = setup.device < 0 ? make_host_executor() : gpu_executor(setup.device);
  buffer_ = std::make_unique<Buffer>(setup.bootstrap, executor_, options);
}

NativeBuffer::~NativeBuffer() { drop(); }

Buffer& NativeBuffer::alive() const {
  if (!buffer_) throw UseAfterDestroy("the buffer was used after destroy");
  return *buffer_;
}

void NativeBuffer::complete(CallOptions& options) const {
  options.stream = Framework::instance().current_stream(device_);
  // Events given to a buffer on the CPU have happened.
  if (device_.kind == Device::Kind::cpu) options.previous_event = options.also_after = nullptr;
}

DispatchHandle NativeBuffer::borrow_handle(const py::tuple& handle) const {
  const HandleElements at = buffer_->num_nodes() == 1 ? kInsideANode : kBetweenNodes;
  if (handle.size() != at.length) {
    throw InvalidArgument(fmt::format("handle has {} elements, expected the tuple of {} that dispatch returned",
                                      handle.size(), at.length));
  }
  const auto tensor = [&](std::size_t index, int dims) { return handle_tensor(handle, index, device_, dims); };
  DispatchHandle result;
  result.rank_prefix_matrix = tensor(at.rank_prefix_matrix, 2);
  result.recv_src_idx = tensor(at.recv_src_idx, 1);
  result.destination_row = tensor(at.destination_row, 2);
  if (at.node_row != 0) {
    result.node_row = tensor(at.node_row, 2);
    result.node_counts = tensor(at.node_counts, 2);
    result.relay_rows = tensor(at.relay_rows, 2);
  }
  result.num_tokens = result.destination_row.size(0);
  result.num_recv_rows = result.recv_src_idx.size(0);
  return result;
}

py::tuple NativeBuffer::get_dispatch_layout(LayoutCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  complete(call.options);
  const DispatchLayout layout =
      without_gil([&] { return buffer.get_dispatch_layout(call.topk_idx, call.num_experts, call.options); });
  return py::make_tuple(
      framework.hand_out(layout.num_tokens_per_rank),
      layout.num_tokens_per_node.defined() ? framework.hand_out(layout.num_tokens_per_node) : py::none(),
      framework.hand_out(layout.num_tokens_per_expert), framework.hand_out(layout.is_token_in_rank),
      event_object(call.options, layout.event, layout.num_tokens_per_rank, layout.is_token_in_rank));
}

py::tuple NativeBuffer::dispatch(DispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  call.arguments.x = call.x.view;
  if (call.is_token_in_rank) call.arguments.is_token_in_rank = call.is_token_in_rank->view;
  if (call.num_tokens_per_rank) call.arguments.num_tokens_per_rank = *call.num_tokens_per_rank;
  if (call.num_tokens_per_expert) call.arguments.num_tokens_per_expert = *call.num_tokens_per_expert;
  complete(call.options);
  const DispatchResult result = without_gil([&] { return buffer.dispatch(call.arguments, call.options); });
  dispatches_.add(call.x.view.bytes());

  return py::make_tuple(
      framework.hand_out(result.recv_x, &call.x.dtype), framework.hand_out(result.recv_x_scales),
      framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights),
      list_of(result.num_recv_tokens_per_expert),
      hand_out_handle(result.handle, call.is_token_in_rank ? call.is_token_in_rank->object : py::none()),
      event_object(call.options, result.event, result.recv_x, result.recv_x_scales, result.recv_topk_idx,
                   result.recv_topk_weights, result.handle.rank_prefix_matrix));
}

py::tuple NativeBuffer::cached_dispatch(CachedDispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  const DispatchHandle handle = borrow_handle(call.handle);
  call.arguments.x = call.x.view;
  call.arguments.handle = &handle;
  complete(call.options);
  const CachedDispatchResult result = without_gil([&] { return buffer.cached_dispatch(call.arguments, call.options); });
  dispatches_.add(call.x.view.bytes());
  return py::make_tuple(framework.hand_out(result.recv_x, &call.x.dtype), framework.hand_out(result.recv_x_scales),
                        event_object(call.options, result.event, result.recv_x, result.recv_x_scales));
}

py::tuple NativeBuffer::combine(CombineCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  const DispatchHandle handle = borrow_handle(call.handle);
  call.arguments.handle = &handle;
  complete(call.options);
  const CombineResult result = without_gil([&] { return buffer.combine(call.arguments, call.options); });
  combines_.add(result.combined_x.view().bytes());
  return py::make_tuple(framework.hand_out(result.combined_x), framework.hand_out(result.combined_topk_weights),
                        event_object(call.options, result.event, result.combined_x, result.combined_topk_weights));
}

py::tuple NativeBuffer::dispatch_elastic(ElasticDispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  call.arguments.x = call.x.view;
  complete(call.options);
  const ElasticDispatchResult result =
      without_gil([&] { return buffer.dispatch_elastic(call.arguments, call.options); });
  dispatches_.add(call.x.view.bytes());
  const ElasticDispatchHandle& handle = result.handle;
  const py::object selections =
      handle.topk_idx.defined() ? framework.hand_out(handle.topk_idx) : py::object(py::none());
  return py::make_tuple(framework.hand_out(result.recv_x, &call.x.dtype), framework.hand_out(result.recv_x_scales),
                        framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights),
                        list_of(result.num_recv_tokens_per_expert), result.num_expanded,
                        py::make_tuple(framework.hand_out(handle.source_ends), framework.hand_out(handle.expert_ends),
                                       framework.hand_out(handle.expert_counts), framework.hand_out(handle.metadata),
                                       framework.hand_out(handle.local_topk_idx),
                                       framework.hand_out(handle.rows_at_owners), hand_out_route(handle), selections),
                        event_object(call.options, result.event, result.recv_x, result.recv_x_scales,
                                     result.recv_topk_idx, result.recv_topk_weights, handle.metadata));
}

py::tuple NativeBuffer::cached_dispatch_elastic(ElasticCachedDispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  call.arguments.x = call.x.view;
  call.arguments.index_dtype = call.indices_are_64_bit ? DType::int64 : DType::int32;
  DispatchHandle route;
  if (buffer.num_nodes() == 1) {
    call.arguments.sent_to = Framework::instance().borrow(call.route[0], "route[0]").view;
  } else {
    Tensor* const tables[] = {&route.rank_prefix_matrix, &route.destination_row, &route.node_row, &route.node_counts,
                              &route.relay_rows};
    for (std::size_t i = 0; i < std::size(tables); ++i) *tables[i] = handle_tensor(call.route, i, device_, 2);
    route.num_tokens = route.destination_row.size(0);
    call.arguments.route = &route;
  }
  complete(call.options);
  const ElasticCachedDispatchResult result =
      without_gil([&] { return buffer.dispatch_elastic(call.arguments, call.options); });
  dispatches_.add(call.x.view.bytes());
  return py::make_tuple(framework.hand_out(result.recv_x, &call.x.dtype), framework.hand_out(result.recv_x_scales),
                        framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights),
                        event_object(call.options, result.event, result.recv_x, result.recv_x_scales,
                                     result.recv_topk_idx, result.recv_topk_weights));
}

py::tuple NativeBuffer::combine_elastic(ElasticCombineCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  complete(call.options);
  const CombineResult result = without_gil([&] { return buffer.combine_elastic(call.arguments, call.options); });
  combines_.add(result.combined_x.view().bytes());
  return py::make_tuple(framework.hand_out(result.combined_x), framework.hand_out(result.combined_topk_weights),
                        event_object(call.options, result.event, result.combined_x, result.combined_topk_weights));
}

py::tuple NativeBuffer::deferred_combine_elastic(ElasticDeferredCombineCall& call) {
  Buffer& buffer = alive();
  complete(call.options);
  const ElasticReturn back = without_gil([&] { return buffer.begin_combine_elastic(call.arguments, call.options); });
  const py::object event = event_object(call.options, back.event, back.rows, back.beside, back.ends);
  return py::make_tuple(py::cpp_function([self = shared_from_this(), arguments = call.arguments, back] {
                          Buffer& the_same = self->alive();
                          CallOptions options;
                          self->complete(options);
                          const CombineResult result =
                              self->without_gil([&] { return the_same.end_combine_elastic(back, arguments, options); });
                          self->combines_.add(result.combined_x.view().bytes());
                          const Framework& framework = Framework::instance();
                          return py::make_tuple(framework.hand_out(result.combined_x),
                                                framework.hand_out(result.combined_topk_weights));
                        }),
                        event);
}

py::object NativeBuffer::barrier(bool async_finish) {
  Buffer& buffer = alive();
  CallOptions options{.async_finish = async_finish};
  complete(options);
  return event_object(options, without_gil([&] { return buffer.barrier(options); }));
}

py::object NativeBuffer::allocate_lb_storage(std::size_t bytes) {
  Buffer& buffer = alive();
  CallOptions options;
  complete(options);
  lb_storage_ = without_gil(
      [&] { return buffer.allocate_tensor(DType::uint8, {static_cast<std::int64_t>(bytes)}, options.stream); });
  return lb_storage();
}

py::object NativeBuffer::lb_storage() const { return Framework::instance().hand_out(lb_storage_); }

py::object NativeBuffer::prefetch_weights(PrefetchWeightsCall& call) {
  Buffer& buffer = alive();
  complete(call.options);
  EventHandle event = without_gil([&] { return buffer.prefetch_weights(call.weights, call.options); });
  return event_object(call.options, std::move(event));
}

py::object NativeBuffer::reduce_grads(ReduceGradsCall& call) {
  Buffer& buffer = alive();
  complete(call.options);
  EventHandle event = without_gil([&] { return buffer.reduce_grads(call.grads, call.options); });
  return event_object(call.options, std::move(event));
}

py::object NativeBuffer::lend(const TensorView& view) { return Framework::instance().hand_out(Tensor::borrow(view)); }

py::object NativeBuffer::local_memory() const { return lend(alive().local_memory()); }

py::object NativeBuffer::metrics() const {
  const std::unique_lock lock(ending_, std::try_to_lock);
  if (!lock) throw UseAfterDestroy("the buffer was used after destroy");
  const Buffer& buffer = alive();
  py::dict calls, bytes;
  for (const auto& [kind, count] :
       std::initializer_list<std::pair<const char*, CallCount>>{{"dispatch", dispatches_},
                                                                {"combine", combines_},
                                                                {"low_latency_dispatch", low_latency_dispatches_},
                                                                {"low_latency_combine", low_latency_combines_}}) {
    calls[kind] = count.calls;
    bytes[kind] = count.bytes;
  }
  py::dict all;
  all["rank"] = buffer.rank();
  all["ranks"] = buffer.num_ranks();
  all["nodes"] = buffer.num_nodes();
  all["calls"] = calls;
  all["bytes"] = bytes;
  all["lost_ranks"] = list_of(buffer.lost_ranks());
  all["description"] = buffer.describe();
  return all;
}

void NativeBuffer::check(bool wait) {
  Buffer& buffer = alive();
  without_gil([&] { buffer.check(wait); });
}

std::size_t NativeBuffer::trim() {
  Buffer& buffer = alive();
  return without_gil([&] { return buffer.trim(); });
}

void NativeBuffer::destroy() {
  Buffer& buffer = alive();
  const py::gil_scoped_release released;
  const std::lock_guard lock(ending_);
  buffer.destroy();
  end();
}

void NativeBuffer::drop() {
  if (!buffer_) return;
  const py::gil_scoped_release released;
  const std::lock_guard lock(ending_);
  end();
}

void NativeBuffer::end() {
  lb_storage_.reset();
  buffer_.reset();
  if (leftovers_ != nullptr) leftovers_->clear();
}

}  // namespace deep_ep::bindings
