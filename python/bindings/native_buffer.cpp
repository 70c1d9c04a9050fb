// A Buffer with Python objects as arguments. deep_ep/buffer.py puts the documented interface on top.
#include "python/bindings/native_buffer.hpp"

#include <fmt/format.h>
#include <pybind11/stl.h>  // ranks are a list of numbers

#include <algorithm>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/interrupt.hpp"
#include "python/bindings/arguments.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {
namespace {

using namespace py::literals;

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
  const auto as = [](py::object made, const TensorArgument& like) {
    return like.renamed ? made.attr("view")(like.object.attr("dtype")) : made;
  };
  py::object handed_out = as(hand_out(rows), sent.rows);
  if (!scales) return handed_out;
  return py::make_tuple(handed_out, as(hand_out(*scales), *sent.scales));
}

template <class Arguments>
void give_rows(const RowsArgument& x, Arguments& arguments) {
  arguments.x = x.rows.view;
  if (x.scales) arguments.x_scales = x.scales->view;
}

// The handle of a dispatch as Python sees it: rank_prefix_matrix, destination_row, recv_src_idx, and between nodes
// where the rows of each source end on this rank, node_row, node_counts, relay_rows. Upstream's tests read elements 0
// and -4.

py::tuple hand_out_handle(const DispatchHandle& handle, int rank) {
  Tensor ends;
  if (handle.node_row.defined()) {
    const Tensor& matrix = handle.rank_prefix_matrix;
    TensorView column = matrix.view();
    column.dims = 1;
    column.data = matrix.as<std::int32_t>() + rank % matrix.size(1);
    ends = Tensor(column, matrix.storage());
  }
  return py::make_tuple(hand_out(handle.rank_prefix_matrix), hand_out(handle.destination_row),
                        hand_out(handle.recv_src_idx), hand_out(ends), hand_out(handle.node_row),
                        hand_out(handle.node_counts), hand_out(handle.relay_rows));
}

DispatchHandle borrow_handle(const py::tuple& handle, const Device& device, bool between_nodes) {
  constexpr std::size_t kLength = 7;
  if (handle.size() != kLength) {
    throw InvalidArgument(
        fmt::format("handle has {} elements, expected the tuple of {} that dispatch returned", handle.size(), kLength));
  }
  const auto tensor = [&](std::size_t index, int dims) { return handle_tensor(handle, index, device, dims); };
  DispatchHandle result;
  result.rank_prefix_matrix = tensor(0, 2);
  result.destination_row = tensor(1, 2);
  result.num_tokens = result.destination_row.size(0);
  if (!handle[2].is_none()) {  // the second interface has none
    result.recv_src_idx = tensor(2, 1);
    result.num_recv_rows = result.recv_src_idx.size(0);
  }
  if (between_nodes) {
    result.node_row = tensor(4, 2);
    result.node_counts = tensor(5, 2);
    result.relay_rows = tensor(6, 2);
  }
  return result;
}

// Low-latency calls.

/// The handle of a low-latency dispatch as Python sees it: (src_info, layout_range, M, H, E). Combine needs more than
/// that. Programs take the tuple apart and build others from its elements, so the rest hangs on src_info: its memory
/// keeps the whole handle, which is found again by the memory's address.
class LowLatencyHandles {
 public:
  /// The memory of src_info, as the framework holds it.
  struct Keeper final : Tensor::Storage {
    explicit Keeper(LowLatencyHandle dispatched) : handle(std::move(dispatched)) {}
    /// The handle's tensors share their memory.
    void record_stream(StreamHandle stream) override { handle.src_info.record_stream(stream); }
    bool knows_stream(StreamHandle stream) const override { return handle.src_info.storage()->knows_stream(stream); }

    const LowLatencyHandle handle;
    std::optional<TensorView> combine_buffer;  ///< that the program got for the handle last
  };
  struct Found {
    std::shared_ptr<Keeper> keeper;
    LowLatencyHandle handle;  ///< with the hidden size that the tuple says
  };

  py::tuple hand_out(const LowLatencyHandle& handle) {
    const auto keeper = std::make_shared<Keeper>(handle);
    by_address_.insert_or_assign(handle.src_info.data(), keeper);
    if (by_address_.size() > tidy_at_) {
      std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
      tidy_at_ = std::max<std::size_t>(64, 2 * by_address_.size());
    }
    return py::make_tuple(bindings::hand_out(Tensor(handle.src_info.view(), keeper)),
                          bindings::hand_out(handle.layout_range), handle.max_tokens, handle.hidden,
                          handle.num_experts);
  }

  /// InvalidArgument if `handle` was not made from what hand_out gave, or src_info is a copy.
  Found find(const py::tuple& handle) const {
    constexpr std::size_t kLength = 5;
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
    const auto require_same = [&](std::size_t index, std::int64_t dispatched) {
      const std::int64_t given = number(handle, index);
      if (given == dispatched) return;
      throw InvalidArgument(fmt::format("handle[{}] is {}, but the dispatch had {}", index, given, dispatched));
    };
    require_same(2, result.max_tokens);
    result.hidden = number(handle, 3);
    require_same(4, result.num_experts);
    return {std::move(keeper), std::move(result)};
  }

 private:
  static std::int64_t number(const py::tuple& handle, std::size_t index) {
    const py::object element = handle[index];
    if (py::isinstance<py::int_>(element)) return element.cast<std::int64_t>();
    throw py::type_error(
        fmt::format("handle[{}] is of type {}, expected an int", index, Py_TYPE(element.ptr())->tp_name));
  }

  std::unordered_map<const void*, std::weak_ptr<Keeper>> by_address_;
  std::size_t tidy_at_ = 64;  ///< at so many entries, those of dead handles are removed
};

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

class NativeBuffer : public std::enable_shared_from_this<NativeBuffer> {
 public:
  /// Collective.
  explicit NativeBuffer(const BufferSetup& setup)
      : device_(setup.device < 0 ? Device{} : Device{Device::Kind::cuda, setup.device}),
        leftovers_(on_cpu() ? std::make_shared<Leftovers>() : nullptr) {
    constexpr std::size_t kPage = std::size_t{2} << 20;
    BufferOptions options = setup.options;
    for (std::size_t* bytes : {&options.heap_bytes, &options.internode.heap_bytes}) {
      *bytes = (Buffer::heap_bytes_for(setup.bootstrap->size(), *bytes) + kPage - 1) / kPage * kPage;
    }
    options.comm_stream = reinterpret_cast<StreamHandle>(setup.comm_stream);
    if (!on_cpu()) options.result_allocator = Framework::instance().allocator();
    options.result_tensors = make_framework_results(setup.results, leftovers_);
    if (setup.timeout_s >= 0) options.timeout_s = setup.timeout_s;
    const py::gil_scoped_release released;
    executor_ = on_cpu() ? make_host_executor() : gpu_executor(setup.device);
    buffer_ = std::make_unique<Buffer>(setup.bootstrap, executor_, options);
  }
  ~NativeBuffer() { drop(); }
  NativeBuffer(const NativeBuffer&) = delete;
  NativeBuffer& operator=(const NativeBuffer&) = delete;

  Buffer& alive() const {
    if (!buffer_) throw UseAfterDestroy("the buffer was used after destroy");
    return *buffer_;
  }
  /// Runs `work` so that other Python threads go on, even while the library waits for a peer. On the CPU the results
  /// are ready afterwards.
  template <class Work>
  auto without_gil(const Work& work, bool settles = false) {
    std::optional<py::error_already_set> raised;
    const py::gil_scoped_release released;
    const InterruptScope interruptible([&] {
      if (raised) return true;
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() == 0) return false;
      raised.emplace();  // KeyboardInterrupt, or what another handler of signals raised
      return true;
    });
    const auto end = [&] {
      if (!on_cpu()) return;
      if (settles) settle_on_cpu();
      alive().check();
      leftovers_->clear();
    };
    try {
      if constexpr (std::is_void_v<decltype(work())>) {
        work();
        end();
      } else {
        auto result = work();
        end();
        return result;
      }
    } catch (const Interrupted&) {
      if (!raised) throw;
      throw py::error_already_set(*raised);
    }
  }
  /// without_gil for what works on the caller's stream: on the CPU it has ended afterwards, too.
  template <class Work>
  auto on_stream(const Work& work) {
    return without_gil(work, true);
  }
  /// `work(buffer, stream)` for what works on the current stream: on the CPU it has ended afterwards.
  template <class Work>
  void on_current_stream(const Work& work) {
    Buffer& buffer = alive();
    const StreamHandle stream = Framework::instance().current_stream(device_);
    on_stream([&] { work(buffer, stream); });
  }

  int num_nodes() { return alive().num_nodes(); }
  std::string describe() { return alive().describe(); }
  /// For exporters, which may ask in a thread of their own: rank, ranks, nodes, lost_ranks, description, calls and
  /// bytes of each kind.
  py::dict metrics() {
    const Buffer& buffer = alive();
    // Before Python makes an object: a finalizer that runs meanwhile may let another thread destroy the buffer.
    const int rank = buffer.rank(), ranks = buffer.num_ranks(), nodes = buffer.num_nodes();
    const std::vector<int> lost = buffer.lost_ranks();
    const std::string description = buffer.describe();
    const auto each_kind = [&](auto CallCount::*number) {
      return py::dict("dispatch"_a = dispatches_.*number, "combine"_a = combines_.*number,
                      "low_latency_dispatch"_a = low_latency_dispatches_.*number,
                      "low_latency_combine"_a = low_latency_combines_.*number);
    };
    return py::dict("rank"_a = rank, "ranks"_a = ranks, "nodes"_a = nodes, "calls"_a = each_kind(&CallCount::calls),
                    "bytes"_a = each_kind(&CallCount::bytes), "lost_ranks"_a = lost, "description"_a = description);
  }

  // Results that do not exist are None.

  /// (num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank, event)
  py::tuple get_dispatch_layout(LayoutCall& call) {
    Buffer& buffer = alive();
    complete(call.options);
    const DispatchLayout layout =
        without_gil([&] { return buffer.get_dispatch_layout(call.topk_idx, call.num_experts, call.options); });
    return py::make_tuple(hand_out(layout.num_tokens_per_rank), hand_out(layout.num_tokens_per_node),
                          hand_out(layout.num_tokens_per_expert), hand_out(layout.is_token_in_rank),
                          event_object(call.options, layout.event));
  }

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, handle, event), with a handle None
  /// between the first and the last.
  py::tuple dispatch(DispatchCall& call) {
    Buffer& buffer = alive();
    complete(call.options);
    give_rows(call.x, call.arguments);
    DispatchHandle earlier;
    if (call.handle) {
      earlier = borrow_handle(*call.handle);
      call.arguments.handle = &earlier;
    }
    if (call.is_token_in_rank) call.arguments.is_token_in_rank = *call.is_token_in_rank;
    if (call.num_tokens_per_rank) call.arguments.num_tokens_per_rank = *call.num_tokens_per_rank;
    if (call.num_tokens_per_expert) call.arguments.num_tokens_per_expert = *call.num_tokens_per_expert;
    const DispatchResult result = without_gil([&] { return buffer.dispatch(call.arguments, call.options); });
    dispatches_.add(call.x.rows.view.bytes());
    py::object counts = py::none(), handle = py::none();
    if (!call.handle) {
      counts = py::cast(result.num_recv_tokens_per_expert);
      handle = hand_out_handle(result.handle, buffer.rank());
    }
    return py::make_tuple(hand_out_rows(result.recv_x, result.recv_x_scales, call.x), hand_out(result.recv_topk_idx),
                          hand_out(result.recv_topk_weights), counts, handle,
                          event_object(call.options, result.event, {&result.handle.rank_prefix_matrix}));
  }

  /// (combined_x, combined_topk_weights, event)
  py::tuple combine(CombineCall& call) {
    Buffer& buffer = alive();
    const DispatchHandle handle = borrow_handle(call.handle);
    call.arguments.handle = &handle;
    complete(call.options);
    return hand_out_combined(without_gil([&] { return buffer.combine(call.arguments, call.options); }), call.options);
  }

  // The second interface.

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, rows of the expanded layout, handle,
  /// event). The handle is a tuple of the tensors of ElasticDispatchHandle, but that its route is a tuple by itself;
  /// None with a handle of an earlier dispatch.
  py::tuple dispatch_elastic(ElasticDispatchCall& call) {
    Buffer& buffer = alive();
    give_rows(call.x, call.arguments);
    if (call.topk_idx) call.arguments.topk_idx = *call.topk_idx;
    if (call.handle) {
      ElasticDispatchHandle& earlier = call.handle->handle;
      if (call.handle->expert_ends) earlier.expert_ends = *call.handle->expert_ends;
      earlier.index_dtype = call.handle->indices_are_64_bit ? DType::int64 : DType::int32;
      const py::tuple& route = call.handle->route;
      if (buffer.num_nodes() == 1) {
        earlier.sent_to = Tensor::borrow(Framework::instance().borrow(route[0], "route[0]").view);
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
      const py::tuple route = handle.sent_to.defined() ? py::make_tuple(hand_out(handle.sent_to))
                                                       : hand_out_handle(handle.route, buffer.rank());
      made = py::make_tuple(hand_out(handle.source_ends), hand_out(handle.expert_ends), hand_out(handle.expert_counts),
                            hand_out(handle.metadata), hand_out(handle.local_topk_idx), hand_out(handle.rows_at_owners),
                            route, hand_out(handle.topk_idx));
    }
    return py::make_tuple(hand_out_rows(result.recv_x, result.recv_x_scales, call.x), hand_out(result.recv_topk_idx),
                          hand_out(result.recv_topk_weights), result.num_recv_tokens_per_expert, handle.num_expanded,
                          made, event_object(call.options, result.event, {&handle.metadata}));
  }

  /// (combined_x, combined_topk_weights, event). Deferred: (function, event); the function returns (combined_x,
  /// combined_topk_weights, None), and until then topk_idx and biases must live.
  py::tuple combine_elastic(ElasticCombineCall& call) {
    Buffer& buffer = alive();
    complete(call.options);
    if (!call.deferred) {
      return hand_out_combined(without_gil([&] { return buffer.combine_elastic(call.arguments, call.options); }),
                               call.options);
    }
    const ElasticReturn back = without_gil([&] { return buffer.begin_combine_elastic(call.arguments, call.options); });
    const auto add_up = [self = shared_from_this(), back]() -> py::tuple {
      Buffer& the_same = self->alive();
      CallOptions options;
      self->complete(options);
      return self->hand_out_combined(self->without_gil([&] { return the_same.end_combine_elastic(back, options); }),
                                     options);
    };
    return py::make_tuple(py::cpp_function(add_up),
                          event_object(call.options, back.event, {&back.rows, &back.beside, &back.ends, &back.row_of}));
  }

  /// On the current stream; with `async_finish` on the communication stream, and it returns an event.
  py::object barrier(bool async_finish) {
    return event_of({.async_finish = async_finish},
                    [](Buffer& buffer, auto& options) { return buffer.barrier(options); });
  }

  // Replicas of experts.

  /// Memory for them in the heap, once, before any other call: [bytes] uint8, the same on all ranks.
  py::object allocate_lb_storage(std::size_t bytes) {
    on_current_stream([&](Buffer& buffer, StreamHandle stream) {
      lb_storage_ = buffer.allocate_tensor(DType::uint8, {static_cast<std::int64_t>(bytes)}, stream);
    });
    return lb_storage();
  }
  /// The same tensor, or None. Tensors over it keep the memory alive.
  py::object lb_storage() { return hand_out(lb_storage_); }
  /// An event.
  py::object prefetch_weights(PrefetchWeightsCall& call) {
    return event_of(call.options,
                    [&](Buffer& buffer, auto& options) { return buffer.prefetch_weights(call.weights, options); });
  }
  py::object reduce_grads(ReduceGradsCall& call) {
    return event_of(call.options,
                    [&](Buffer& buffer, auto& options) { return buffer.reduce_grads(call.grads, options); });
  }

  // Low-latency calls.

  /// (rows or (rows, scales), recv_count, handle, event, hook): see deep_ep/buffer.py.
  py::tuple low_latency_dispatch(LowLatencyDispatchCall& call) {
    Buffer& buffer = alive();
    call.arguments.format = format_of(call);
    if (call.arguments.return_recv_hook) call.arguments.owner = owner_of(call.given);
    complete(call.options);
    LowLatencyDispatchResult result =
        on_stream([&] { return buffer.low_latency_dispatch(call.arguments, call.options); });
    low_latency_dispatches_.add(call.arguments.x.bytes());
    py::object rows = hand_out(result.recv_x);
    if (result.recv_x_scales) rows = py::make_tuple(rows, hand_out(*result.recv_x_scales));
    const py::object event = event_object(call.options, result.event, {&result.handle.src_info});
    return py::make_tuple(std::move(rows), hand_out(result.recv_count), handles_.hand_out(result.handle), event,
                          hook_object(std::move(result.hook)));
  }

  /// (combined_x, event, hook)
  py::tuple low_latency_combine(LowLatencyCombineCall& call) {
    Buffer& buffer = alive();
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
    if (call.arguments.return_recv_hook) call.arguments.owner = owner_of(call.given);
    if (call.out) call.arguments.out = call.out->view;
    if (call.overlaps) call.arguments.overlap = call.overlap;
    complete(call.options);
    LowLatencyCombineResult result =
        on_stream([&] { return buffer.low_latency_combine(call.arguments, call.options); });
    low_latency_combines_.add(result.combined_x.view().bytes());
    return py::make_tuple(call.out ? call.out->object : hand_out(result.combined_x),
                          event_object(call.options, result.event), hook_object(std::move(result.hook)));
  }

  /// A tensor over the memory that combine reads with zero_copy.
  py::object low_latency_combine_buffer(const py::tuple& handle) {
    const auto [keeper, dispatched] = handles_.find(handle);
    const TensorView rows = alive().low_latency_combine_buffer(dispatched);
    combine_buffers_.insert(rows.data);
    keeper->combine_buffer = rows;
    return lend(rows);
  }
  void low_latency_query_mask(py::handle mask_status) {
    const TensorView status = Framework::instance().borrow(mask_status, "mask_status").view;
    on_current_stream([&](Buffer& buffer, StreamHandle stream) { buffer.low_latency_query_mask(status, stream); });
  }
  /// Collective; the host waits.
  void replace_ranks(const std::shared_ptr<Bootstrap>& group, const std::vector<int>& ranks) {
    Buffer& buffer = alive();
    without_gil([&] { buffer.replace_ranks(group, ranks); });
  }

  /// A tensor over the symmetric heap of this rank; `dtype` uint8. Its memory ends with the buffer.
  py::object local_memory() { return lend(alive().local_memory()); }
  /// The same over the memory of low-latency calls.
  py::object low_latency_memory() { return lend(alive().low_latency_memory()); }

  /// Collective.
  void destroy() {
    alive();
    end(true);
  }
  /// Frees without talking to peers.
  void drop() {
    if (buffer_) end(false);
  }

 private:
  /// With the GIL. Bytes: of the rows of this rank's tokens, as dispatch reads and combine writes them.
  struct CallCount {
    std::uint64_t calls = 0, bytes = 0;
    void add(std::size_t more) { ++calls, bytes += more; }
  };

  bool on_cpu() const { return device_.kind == Device::Kind::cpu; }
  /// Fills in what Python does not say: the current stream.
  void complete(CallOptions& options) const {
    options.stream = Framework::instance().current_stream(device_);
    // Events given to a buffer on the CPU have happened.
    if (on_cpu()) options.previous_event = options.also_after = nullptr;
  }
  DispatchHandle borrow_handle(const py::tuple& handle) const {
    return bindings::borrow_handle(handle, device_, buffer_->num_nodes() > 1);
  }
  py::tuple hand_out_combined(const CombineResult& result, const CallOptions& options) {
    combines_.add(result.combined_x.view().bytes());
    return py::make_tuple(hand_out(result.combined_x), hand_out(result.combined_topk_weights),
                          event_object(options, result.event));
  }
  /// `kept`: results that are memory of the library, as the tables of handles are.
  py::object event_object(const CallOptions& options, EventHandle event,
                          std::initializer_list<const Tensor*> kept = {}) const {
    if (!options.async_finish) return py::none();
    return py::cast(Event(executor_, std::move(event), kept));
  }
  /// Of `work(buffer, options)`, which has no other result.
  template <class Work>
  py::object event_of(CallOptions options, const Work& work) {
    Buffer& buffer = alive();
    complete(options);
    return event_object(options, without_gil([&] { return work(buffer, options); }));
  }
  /// The arguments of a call, for a receive part that waits for its hook.
  std::shared_ptr<void> owner_of(const py::args& given) const {
    return {py::object(given).release().ptr(),
            [leftovers = leftovers_](void* object) { Leftovers::add(leftovers, static_cast<PyObject*>(object)); }};
  }
  /// None without `receive`.
  py::object hook_object(std::function<void()> receive) {
    if (!receive) return py::none();
    return py::cast(ReceiveHook{[self = shared_from_this(), receive = std::move(receive)] {
      self->alive();  // the buffer may have been destroyed since the send part
      self->on_stream([&] { receive(); });
    }});
  }
  /// Waits for what is enqueued, or until the user interrupts it.
  void settle_on_cpu() {
    try {
      executor_->synchronize(nullptr);
    } catch (const Interrupted&) {
      // The check that follows ends the call.
    }
  }
  /// A tensor of memory that ends with the buffer.
  static py::object lend(const TensorView& view) { return hand_out(Tensor::borrow(view)); }

  void end(bool with_peers) {
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

  Device device_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<Leftovers> leftovers_;  ///< on the CPU
  std::unique_ptr<Buffer> buffer_;
  std::optional<Tensor> lb_storage_;
  LowLatencyHandles handles_;
  std::set<const void*> combine_buffers_;  ///< that came to the program
  CallCount dispatches_, combines_, low_latency_dispatches_, low_latency_combines_;
};

// The methods by their names.

using BufferClass = py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>>;

/// A method whose arguments a Call lists.
template <class Result, class Call>
void define_call(BufferClass& buffer, const char* name, Result (NativeBuffer::*method)(Call&)) {
  buffer.def(
      name,
      [name, method](NativeBuffer& self, const py::args& given) {
        Call call;
        call.given = given;
        ArgumentReader::read_call(name, given, call);
        return (self.*method)(call);
      },
      signature_of_call<Call>(name, Call::kReturns).c_str());
}

/// Any other method.
template <class Result, class... Parameters>
void define(BufferClass& buffer, const char* name, Result (NativeBuffer::*method)(Parameters...),
            std::initializer_list<const char*> names = {}) {
  buffer.def(name, method, signature_of<Result, Parameters...>(name, names, true).c_str());
}

/// A method of the library that may take its time; its last parameter may be the current stream.
template <auto method, class... Parameters>
void define(BufferClass& buffer, const char* name, std::initializer_list<const char*> names = {}) {
  const auto call = [](NativeBuffer& self, Parameters... given) {
    self.on_current_stream([&](Buffer& alive, [[maybe_unused]] StreamHandle stream) {
      if constexpr (std::is_invocable_v<decltype(method), Buffer&, Parameters..., StreamHandle>) {
        (alive.*method)(given..., stream);
      } else {
        (alive.*method)(given...);
      }
    });
  };
  buffer.def(name, call, signature_of<void, Parameters...>(name, names, true).c_str());
}

}  // namespace

void define_buffer(py::module_& module) {
  BufferClass buffer(module, "Buffer", "What deep_ep.Buffer is made of.");
  buffer.def(py::init([](const py::args& given) {
               BufferSetup setup;
               ArgumentReader::read_call("Buffer", given, setup);
               return std::make_shared<NativeBuffer>(setup);
             }),
             signature_of_call<BufferSetup>("__init__", "None").c_str());
  define(buffer, "num_nodes", &NativeBuffer::num_nodes);
  define(buffer, "describe", &NativeBuffer::describe);
  define(buffer, "metrics", &NativeBuffer::metrics);
  define_call(buffer, "get_dispatch_layout", &NativeBuffer::get_dispatch_layout);
  define_call(buffer, "dispatch", &NativeBuffer::dispatch);
  define_call(buffer, "combine", &NativeBuffer::combine);
  define_call(buffer, "dispatch_elastic", &NativeBuffer::dispatch_elastic);
  define_call(buffer, "combine_elastic", &NativeBuffer::combine_elastic);
  define(buffer, "barrier", &NativeBuffer::barrier, {"async_finish"});
  define(buffer, "allocate_lb_storage", &NativeBuffer::allocate_lb_storage, {"bytes"});
  buffer.def_property_readonly("lb_storage", &NativeBuffer::lb_storage);
  define_call(buffer, "prefetch_weights", &NativeBuffer::prefetch_weights);
  define_call(buffer, "reduce_grads", &NativeBuffer::reduce_grads);
  define(buffer, "local_memory", &NativeBuffer::local_memory);
  define<&Buffer::check, bool>(buffer, "check", {"wait"});
  define<&Buffer::suspend>(buffer, "suspend");
  define<&Buffer::resume>(buffer, "resume");
  define(buffer, "destroy", &NativeBuffer::destroy);
  define(buffer, "drop", &NativeBuffer::drop);

  define_call(buffer, "low_latency_dispatch", &NativeBuffer::low_latency_dispatch);
  define_call(buffer, "low_latency_combine", &NativeBuffer::low_latency_combine);
  define(buffer, "low_latency_combine_buffer", &NativeBuffer::low_latency_combine_buffer, {"handle"});
  define(buffer, "low_latency_memory", &NativeBuffer::low_latency_memory);
  define<&Buffer::low_latency_clean>(buffer, "low_latency_clean");
  define<&Buffer::low_latency_update_mask, int, bool>(buffer, "low_latency_update_mask", {"rank", "masked"});
  define(buffer, "low_latency_query_mask", &NativeBuffer::low_latency_query_mask, {"mask_status"});
  define<&Buffer::low_latency_clear_mask>(buffer, "low_latency_clear_mask");
  define<&Buffer::low_latency_resume>(buffer, "low_latency_resume");
  define(buffer, "replace_ranks", &NativeBuffer::replace_ranks, {"group", "ranks"});
}

}  // namespace deep_ep::bindings
