#include "python/bindings/native_buffer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/error.hpp"

namespace deep_ep::bindings {
namespace {

// The handle of a dispatch as Python sees it: rank_prefix_matrix, destination_row, recv_src_idx, and between nodes
// where the rows of each source end on this rank, node_row, node_counts, relay_rows. Upstream's tests read elements 0
// and -4.
constexpr std::size_t kHandleLength = 7;

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

/// In the form of what was sent.
py::object hand_out_rows(const Tensor& rows, const std::optional<Tensor>& scales, const RowsArgument& sent) {
  const Framework& framework = Framework::instance();
  py::object handed_out = framework.hand_out(rows, &sent.rows.dtype);
  if (!scales) return handed_out;
  return py::make_tuple(handed_out, framework.hand_out(*scales, &sent.scales->dtype));
}

template <class Arguments>
void give_rows(const RowsArgument& x, Arguments& arguments) {
  arguments.x = x.rows.view;
  if (x.scales) arguments.x_scales = x.scales->view;
}

template <class Arguments>
void give_biases(const Biases& bias, Arguments& arguments) {
  arguments.bias_0 = bias.first;
  arguments.bias_1 = bias.second;
}

py::tuple hand_out_handle(const DispatchHandle& handle, int rank) {
  const Framework& framework = Framework::instance();
  py::object ends = py::none();
  if (handle.node_row.defined()) {
    const Tensor& matrix = handle.rank_prefix_matrix;
    TensorView column = matrix.view();
    column.dims = 1;
    column.data = matrix.as<std::int32_t>() + rank % matrix.size(1);
    ends = framework.hand_out(Tensor(column, matrix.storage()));
  }
  return py::make_tuple(framework.hand_out(handle.rank_prefix_matrix), framework.hand_out(handle.destination_row),
                        framework.hand_out(handle.recv_src_idx), ends, framework.hand_out(handle.node_row),
                        framework.hand_out(handle.node_counts), framework.hand_out(handle.relay_rows));
}

// Low-latency calls.

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

/// Upstream ignores some of them, and has use_fp8 on by default: these are no mistakes.
LowLatencyFormat format_of(const LowLatencyDispatchCall& call) {
  if (call.use_nvfp4) {
    if (!call.round_scale && !call.use_ue8m0) return LowLatencyFormat::nvfp4;
    throw InvalidArgument("use_nvfp4 is without round_scale and use_ue8m0: its scales are E4M3");
  }
  if (call.use_ue8m0) {
    if (call.use_fp8 && call.round_scale) return LowLatencyFormat::fp8_ue8m0;
    throw InvalidArgument("use_ue8m0 needs use_fp8 and round_scale: packed exponents hold powers of two only");
  }
  if (!call.use_fp8) return LowLatencyFormat::bf16;
  if (call.round_scale) return LowLatencyFormat::fp8_round_scale;
  return call.align_fp8_quantization ? LowLatencyFormat::fp8_aligned : LowLatencyFormat::fp8;
}

/// The arguments of a call, for a receive part that waits for its hook.
std::shared_ptr<void> owner_of(const py::args& given, const std::shared_ptr<Leftovers>& leftovers) {
  return {py::object(given).release().ptr(),
          [leftovers](void* object) { Leftovers::add(leftovers, static_cast<PyObject*>(object)); }};
}

}  // namespace

NativeBuffer::NativeBuffer(const BufferSetup& setup)
    : device_(setup.device < 0 ? Device{} : Device{Device::Kind::cuda, setup.device}),
      leftovers_(setup.device < 0 ? std::make_shared<Leftovers>() : nullptr) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  BufferOptions options = setup.options;
  for (std::size_t* bytes : {&options.heap_bytes, &options.internode.heap_bytes}) {
    *bytes = (Buffer::heap_bytes_for(setup.bootstrap->size(), *bytes) + kPage - 1) / kPage * kPage;
  }
  options.comm_stream = reinterpret_cast<StreamHandle>(setup.comm_stream);
  if (setup.device >= 0) options.result_allocator = Framework::instance().allocator();
  options.result_tensors = std::make_shared<FrameworkResults>(setup.results, leftovers_);
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
  if (handle.size() != kHandleLength) {
    throw InvalidArgument(fmt::format("handle has {} elements, expected the tuple of {} that dispatch returned",
                                      handle.size(), kHandleLength));
  }
  const auto tensor = [&](std::size_t index, int dims) { return handle_tensor(handle, index, device_, dims); };
  DispatchHandle result;
  result.rank_prefix_matrix = tensor(0, 2);
  result.destination_row = tensor(1, 2);
  result.num_tokens = result.destination_row.size(0);
  if (!handle[2].is_none()) {  // the second interface has none
    result.recv_src_idx = tensor(2, 1);
    result.num_recv_rows = result.recv_src_idx.size(0);
  }
  if (buffer_->num_nodes() > 1) {
    result.node_row = tensor(4, 2);
    result.node_counts = tensor(5, 2);
    result.relay_rows = tensor(6, 2);
  }
  return result;
}

py::tuple NativeBuffer::get_dispatch_layout(LayoutCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  complete(call.options);
  const DispatchLayout layout =
      without_gil([&] { return buffer.get_dispatch_layout(call.topk_idx, call.num_experts, call.options); });
  return py::make_tuple(framework.hand_out(layout.num_tokens_per_rank), framework.hand_out(layout.num_tokens_per_node),
                        framework.hand_out(layout.num_tokens_per_expert), framework.hand_out(layout.is_token_in_rank),
                        event_object(call.options, layout.event));
}

py::tuple NativeBuffer::dispatch(DispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  complete(call.options);
  give_rows(call.x, call.arguments);
  DispatchHandle handle;
  if (call.handle) {
    handle = borrow_handle(*call.handle);
    call.arguments.handle = &handle;
  }
  if (call.is_token_in_rank) call.arguments.is_token_in_rank = *call.is_token_in_rank;
  if (call.num_tokens_per_rank) call.arguments.num_tokens_per_rank = *call.num_tokens_per_rank;
  if (call.num_tokens_per_expert) call.arguments.num_tokens_per_expert = *call.num_tokens_per_expert;
  const DispatchResult result = without_gil([&] { return buffer.dispatch(call.arguments, call.options); });
  dispatches_.add(call.x.rows.view.bytes());
  if (call.handle) {
    const py::none none;
    return py::make_tuple(hand_out_rows(result.recv_x, result.recv_x_scales, call.x), none, none, none, none,
                          event_object(call.options, result.event));
  }

  return py::make_tuple(hand_out_rows(result.recv_x, result.recv_x_scales, call.x),
                        framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights),
                        list_of(result.num_recv_tokens_per_expert), hand_out_handle(result.handle, buffer.rank()),
                        event_object(call.options, result.event, {&result.handle.rank_prefix_matrix}));
}

py::tuple NativeBuffer::hand_out(const CombineResult& result, const CallOptions& options) {
  const Framework& framework = Framework::instance();
  combines_.add(result.combined_x.view().bytes());
  return py::make_tuple(framework.hand_out(result.combined_x), framework.hand_out(result.combined_topk_weights),
                        event_object(options, result.event));
}

py::tuple NativeBuffer::combine(CombineCall& call) {
  Buffer& buffer = alive();
  const DispatchHandle handle = borrow_handle(call.handle);
  call.arguments.handle = &handle;
  give_biases(call.bias, call.arguments);
  complete(call.options);
  return hand_out(without_gil([&] { return buffer.combine(call.arguments, call.options); }), call.options);
}

py::tuple NativeBuffer::dispatch_elastic(ElasticDispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  give_rows(call.x, call.arguments);
  if (call.topk_idx) call.arguments.topk_idx = *call.topk_idx;
  if (call.handle) {
    ElasticDispatchHandle& earlier = call.handle->handle;
    if (call.handle->expert_ends) earlier.expert_ends = *call.handle->expert_ends;
    earlier.index_dtype = call.handle->indices_are_64_bit ? DType::int64 : DType::int32;
    const py::tuple& route = call.handle->route;
    if (buffer.num_nodes() == 1) {
      earlier.sent_to = Tensor::borrow(framework.borrow(route[0], "route[0]").view);
    } else {
      earlier.route = borrow_handle(route);
    }
    call.arguments.handle = &earlier;
  }
  complete(call.options);
  const ElasticDispatchResult result =
      without_gil([&] { return buffer.dispatch_elastic(call.arguments, call.options); });
  dispatches_.add(call.x.rows.view.bytes());
  const ElasticDispatchHandle& handle = result.handle;
  py::object made = py::none();
  if (!call.handle) {
    const bool inside_a_node = handle.sent_to.defined();
    const py::tuple route = inside_a_node ? py::make_tuple(framework.hand_out(handle.sent_to))
                                          : hand_out_handle(handle.route, buffer.rank());
    made = py::make_tuple(framework.hand_out(handle.source_ends), framework.hand_out(handle.expert_ends),
                          framework.hand_out(handle.expert_counts), framework.hand_out(handle.metadata),
                          framework.hand_out(handle.local_topk_idx), framework.hand_out(handle.rows_at_owners), route,
                          framework.hand_out(handle.topk_idx));
  }
  return py::make_tuple(hand_out_rows(result.recv_x, result.recv_x_scales, call.x),
                        framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights),
                        list_of(result.num_recv_tokens_per_expert), handle.num_expanded, made,
                        event_object(call.options, result.event, {&handle.metadata}));
}

py::tuple NativeBuffer::combine_elastic(ElasticCombineCall& call) {
  Buffer& buffer = alive();
  give_biases(call.bias, call.arguments);
  complete(call.options);
  if (!call.deferred) {
    return hand_out(without_gil([&] { return buffer.combine_elastic(call.arguments, call.options); }), call.options);
  }
  const ElasticReturn back = without_gil([&] { return buffer.begin_combine_elastic(call.arguments, call.options); });
  const py::object event = event_object(call.options, back.event, {&back.rows, &back.beside, &back.ends, &back.row_of});
  return py::make_tuple(py::cpp_function([self = shared_from_this(), arguments = call.arguments, back] {
                          Buffer& the_same = self->alive();
                          CallOptions options;
                          self->complete(options);
                          return self->hand_out(
                              self->without_gil([&] { return the_same.end_combine_elastic(back, arguments, options); }),
                              options);
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

py::object NativeBuffer::lb_storage() { return Framework::instance().hand_out(lb_storage_); }

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

py::object NativeBuffer::local_memory() { return lend(alive().local_memory()); }

py::object NativeBuffer::metrics() {
  const Buffer& buffer = alive();
  // Before Python makes an object: a finalizer that runs meanwhile may let another thread destroy the buffer.
  const int rank = buffer.rank(), ranks = buffer.num_ranks(), nodes = buffer.num_nodes();
  const auto lost = buffer.lost_ranks();
  const std::string description = buffer.describe();
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
  all["rank"] = rank;
  all["ranks"] = ranks;
  all["nodes"] = nodes;
  all["calls"] = calls;
  all["bytes"] = bytes;
  all["lost_ranks"] = list_of(lost);
  all["description"] = description;
  return all;
}

void NativeBuffer::destroy() {
  alive();
  end(true);
}

void NativeBuffer::drop() {
  if (buffer_) end(false);
}

void NativeBuffer::end(bool with_peers) {
  // Under the GIL: no other thread, as one that asks for metrics, finds the buffer that ends.
  std::unique_ptr<Buffer> found = std::exchange(buffer_, nullptr);
  std::optional<Tensor> storage = std::exchange(lb_storage_, std::nullopt);
  const py::gil_scoped_release released;
  std::unique_ptr<Buffer> ending = std::move(found);
  try {
    if (with_peers) ending->destroy();
  } catch (...) {
    if (!ending->destroyed()) {  // another call uses it
      const py::gil_scoped_acquire acquired;
      buffer_ = std::move(ending);
      lb_storage_ = std::move(storage);
    }
    throw;
  }
  storage.reset();
  if (leftovers_ != nullptr) leftovers_->clear();
}

// Low-latency calls.

struct LowLatencyHandles::Keeper final : Tensor::Storage {
  explicit Keeper(LowLatencyHandle dispatched) : handle(std::move(dispatched)) {}
  /// The handle's tensors share their memory.
  void record_stream(StreamHandle stream) override { handle.src_info.record_stream(stream); }
  bool knows_stream(StreamHandle stream) const override { return handle.src_info.storage()->knows_stream(stream); }

  const LowLatencyHandle handle;
  std::optional<TensorView> combine_buffer;  ///< that the program got for the handle last
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

LowLatencyHandles::Found LowLatencyHandles::find(const py::tuple& handle) const {
  if (handle.size() != kLength) {
    throw InvalidArgument(
        fmt::format("handle has {} elements, expected the tuple of {} that low_latency_dispatch "
                    "returned",
                    handle.size(), kLength));
  }
  const TensorView src_info = Framework::instance().borrow(handle[0], "handle[0]").view;
  const auto entry = by_address_.find(src_info.data);
  std::shared_ptr<Keeper> keeper = entry == by_address_.end() ? nullptr : entry->second.lock();
  if (!keeper) {
    throw InvalidArgument(
        fmt::format("handle[0] is {}, but not the tensor that this buffer's low_latency_dispatch "
                    "returned (a copy does not do: combine needs what lies behind it)",
                    src_info.describe()));
  }
  LowLatencyHandle result = keeper->handle;
  require_same(2, number(handle, 2), result.max_tokens);
  result.hidden = number(handle, 3);
  require_same(4, number(handle, 4), result.num_experts);
  return {std::move(keeper), std::move(result)};
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
  return py::cast(ReceiveHook{[self = shared_from_this(), receive = std::move(receive)] {
    self->alive();  // the buffer may have been destroyed since the send part
    self->on_stream([&] { receive(); });
  }});
}

py::tuple NativeBuffer::low_latency_dispatch(LowLatencyDispatchCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  call.arguments.format = format_of(call);
  if (call.arguments.return_recv_hook) call.arguments.owner = owner_of(call.given, leftovers_);
  complete(call.options);
  LowLatencyDispatchResult result =
      on_stream([&] { return buffer.low_latency_dispatch(call.arguments, call.options); });
  low_latency_dispatches_.add(call.arguments.x.bytes());
  py::object rows = framework.hand_out(result.recv_x);
  if (result.recv_x_scales) rows = py::make_tuple(rows, framework.hand_out(*result.recv_x_scales));
  const py::object event = event_object(call.options, result.event, {&result.handle.src_info});
  return py::make_tuple(std::move(rows), framework.hand_out(result.recv_count), handles_.hand_out(result.handle), event,
                        hook_object(std::move(result.hook)));
}

py::tuple NativeBuffer::low_latency_combine(LowLatencyCombineCall& call) {
  Buffer& buffer = alive();
  const Framework& framework = Framework::instance();
  const auto [keeper, dispatched] = handles_.find(call.handle);
  if (call.zero_copy) {
    if (call.arguments.use_logfmt) {
      throw InvalidArgument("zero_copy and use_logfmt are both true, allowed: at most one of them");
    }
    // A larger buffer may have taken its place since.
    const std::optional<TensorView>& lent = keeper->combine_buffer;
    const bool fits = lent && lent->size(2) == dispatched.hidden;
    const TensorView rows = fits ? *lent : buffer.low_latency_combine_buffer(dispatched);
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
  return py::make_tuple(combined, event_object(call.options, result.event), hook_object(std::move(result.hook)));
}

py::object NativeBuffer::low_latency_combine_buffer(const py::tuple& handle) {
  const auto [keeper, dispatched] = handles_.find(handle);
  const TensorView rows = alive().low_latency_combine_buffer(dispatched);
  combine_buffers_.insert(rows.data);
  keeper->combine_buffer = rows;
  return lend(rows);
}

py::object NativeBuffer::low_latency_memory() { return lend(alive().low_latency_memory()); }

void NativeBuffer::low_latency_query_mask(py::handle mask_status) {
  const TensorView status = Framework::instance().borrow(mask_status, "mask_status").view;
  on_current_stream([&](Buffer& buffer, StreamHandle stream) { buffer.low_latency_query_mask(status, stream); });
}

void NativeBuffer::replace_ranks(const std::shared_ptr<Bootstrap>& group, const std::vector<int>& ranks) {
  Buffer& buffer = alive();
  without_gil([&] { buffer.replace_ranks(group, ranks); });
}

}  // namespace deep_ep::bindings
