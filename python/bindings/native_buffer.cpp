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

struct BufferSetup {
  std::shared_ptr<Bootstrap> bootstrap;
  int device = -1;                 ///< a GPU's ordinal, -1 for the CPU
  std::uintptr_t comm_stream = 0;  ///< of the framework, lives as long as the process; 0 on the CPU
  py::object results;              ///< deep_ep.results.Results
  BufferOptions options;           ///< heap_bytes: of received tensors
};

/// The arguments of a call as the library has them. Calls below have others, too.
template <class Arguments>
struct Call {
  Arguments arguments;
  CallOptions options;
  py::args given;  ///< all arguments, for what must keep them
};
struct Selections {
  ConstTensorView topk_idx;
  int num_experts = 0;
};
struct DispatchCall : Call<DispatchArguments> {
  RowsArgument x;
  std::optional<py::tuple> handle;
};
struct CombineCall : Call<CombineArguments> {
  py::tuple handle;
};
struct ElasticDispatchCall : Call<ElasticDispatchArguments> {
  RowsArgument x;
  std::optional<py::tuple> route;  ///< with it rows go where those of an earlier dispatch went
  ElasticDispatchHandle earlier;
};
struct ElasticCombineCall : Call<ElasticCombineArguments> {
  bool deferred = false;  ///< the sums are made when the function is called that comes instead of results
};
struct LowLatencyDispatchCall : Call<LowLatencyDispatchArguments> {
  bool use_fp8 = true, round_scale = false, use_ue8m0 = false, use_nvfp4 = false, align_fp8_quantization = false;
};
struct LowLatencyCombineCall : Call<LowLatencyCombineArguments> {
  py::tuple handle;
  bool zero_copy = false;
  std::optional<TensorArgument> out;
  bool overlaps = false;
  LowLatencyOverlap overlap;
};

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

template <class Call>
void give_rows(Call& call) {
  call.arguments.x = call.x.rows.view;
  if (call.x.scales) call.arguments.x_scales = call.x.scales->view;
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

  py::tuple hand_out(LowLatencyHandle handle) {
    py::object layout_range = bindings::hand_out(std::exchange(handle.layout_range, {}));  // the program's alone
    const auto keeper = std::make_shared<Keeper>(std::move(handle));
    const LowLatencyHandle& kept = keeper->handle;
    by_address_.insert_or_assign(kept.src_info.data(), keeper);
    if (by_address_.size() > tidy_at_) {
      std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
      tidy_at_ = std::max<std::size_t>(64, 2 * by_address_.size());
    }
    return py::make_tuple(bindings::hand_out(Tensor(kept.src_info.view(), keeper)), std::move(layout_range),
                          kept.max_tokens, kept.hidden, kept.num_experts);
  }

  /// Keeper of `handle`, and the same handle with the hidden size that the tuple says. InvalidArgument if it was not
  /// made from what hand_out gave, or src_info is a copy.
  std::pair<std::shared_ptr<Keeper>, LowLatencyHandle> find(const py::tuple& handle) const {
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
  if (x.dims == buffer.dims && x.dtype == buffer.dtype && x.shape == buffer.shape) return;
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
    options.result_tensors = make_framework_results(setup.results, leftovers_);
    const py::gil_scoped_release released;
    executor_ = on_cpu() ? make_host_executor() : gpu_executor(setup.device);
    buffer_ = std::make_shared<Buffer>(setup.bootstrap, executor_, options);
    rank_ = buffer_->rank();
    num_nodes_ = buffer_->num_nodes();
  }
  ~NativeBuffer() { drop(); }
  NativeBuffer(const NativeBuffer&) = delete;
  NativeBuffer& operator=(const NativeBuffer&) = delete;

  Buffer& alive() const {
    if (!buffer_) throw UseAfterDestroy("the buffer was used after destroy");
    return *buffer_;
  }
  /// `work(buffer, options)` behind the current stream, so that other Python threads go on, even while the library
  /// waits for a peer. On the CPU all that the call has enqueued has ended afterwards.
  template <class Work>
  auto run(CallOptions options, const Work& work) {
    const std::shared_ptr<Buffer> holder = buffer_;  // another thread may destroy it meanwhile
    Buffer& buffer = alive();
    options.stream = Framework::instance().current_stream(device_);
    // Events given to a buffer on the CPU have happened.
    if (on_cpu()) options.previous_event = options.also_after = nullptr;
    std::optional<py::error_already_set> raised;
    const py::gil_scoped_release released;
    const InterruptScope interruptible([&] {
      if (raised) return true;
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() == 0) return false;
      raised.emplace();  // KeyboardInterrupt, or what another handler of signals raised
      return true;
    });
    try {
      if constexpr (std::is_void_v<decltype(work(buffer, options))>) {
        work(buffer, options);
        if (on_cpu()) settle(buffer);
      } else {
        auto result = work(buffer, options);
        if (on_cpu()) settle(buffer);
        return result;
      }
    } catch (const Interrupted&) {
      if (!raised) throw;
      throw py::error_already_set(*raised);
    }
  }
  /// A method of the library with what Python gave.
  template <class Arguments, class Result>
  Result run(const Call<Arguments>& call, Result (Buffer::*method)(const Arguments&, const CallOptions&)) {
    return run(call.options,
               [&](Buffer& buffer, const CallOptions& options) { return (buffer.*method)(call.arguments, options); });
  }
  /// The same for one whose only result is an event.
  template <auto method, class Arguments>
  py::object event_of(Call<Arguments>& call) {
    return event_object(call.options, run(call, method));
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
    py::dict calls, bytes;
    for (const CallCount* each : {&dispatches_, &combines_, &low_latency_dispatches_, &low_latency_combines_}) {
      calls[each->kind] = each->calls;
      bytes[each->kind] = each->bytes;
    }
    return py::dict("rank"_a = rank, "ranks"_a = ranks, "nodes"_a = nodes, "calls"_a = calls, "bytes"_a = bytes,
                    "lost_ranks"_a = lost, "description"_a = description);
  }

  // Results that do not exist are None.

  /// (num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank, event)
  py::tuple get_dispatch_layout(Call<Selections>& call) {
    const DispatchLayout layout = run(call.options, [&](Buffer& buffer, const CallOptions& options) {
      return buffer.get_dispatch_layout(call.arguments.topk_idx, call.arguments.num_experts, options);
    });
    return py::make_tuple(hand_out(layout.num_tokens_per_rank), hand_out(layout.num_tokens_per_node),
                          hand_out(layout.num_tokens_per_expert), hand_out(layout.is_token_in_rank),
                          event_object(call.options, layout.event));
  }

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, handle, event), with a handle None
  /// between the first and the last.
  py::tuple dispatch(DispatchCall& call) {
    give_rows(call);
    DispatchHandle earlier;
    if (call.handle) {
      earlier = borrow_handle(*call.handle);
      call.arguments.handle = &earlier;
    }
    const DispatchResult result = run(call, &Buffer::dispatch);
    dispatches_.add(call.x.rows.view.bytes());
    py::object counts = py::none(), handle = py::none();
    if (!call.handle) {
      counts = py::cast(result.num_recv_tokens_per_expert);
      handle = hand_out_handle(result.handle, rank_);
    }
    return py::make_tuple(hand_out_rows(result.recv_x, result.recv_x_scales, call.x), hand_out(result.recv_topk_idx),
                          hand_out(result.recv_topk_weights), counts, handle,
                          event_object(call.options, result.event, {&result.handle.rank_prefix_matrix}));
  }

  /// (combined_x, combined_topk_weights, event)
  py::tuple combine(CombineCall& call) {
    const DispatchHandle handle = borrow_handle(call.handle);
    call.arguments.handle = &handle;
    return hand_out_combined(run(call, &Buffer::combine), call.options);
  }

  // The second interface.

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, rows of the expanded layout, handle,
  /// event). The handle is a tuple of the tensors of ElasticDispatchHandle, but that its route is a tuple by itself;
  /// None with a handle of an earlier dispatch.
  py::tuple dispatch_elastic(ElasticDispatchCall& call) {
    give_rows(call);
    if (call.route) {
      if (num_nodes_ != 1) call.earlier.route = borrow_handle(*call.route);
      call.arguments.handle = &call.earlier;
    }
    const ElasticDispatchResult result = run(call, &Buffer::dispatch_elastic);
    dispatches_.add(call.x.rows.view.bytes());
    const ElasticDispatchHandle& handle = result.handle;
    py::object made = py::none();
    if (!call.route) {
      const py::tuple route = num_nodes_ == 1 ? py::tuple() : hand_out_handle(handle.route, rank_);
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
    if (!call.deferred) return hand_out_combined(run(call, &Buffer::combine_elastic), call.options);
    const ElasticReturn back = run(call, &Buffer::begin_combine_elastic);
    const auto add_up = [self = shared_from_this(), back]() -> py::tuple {
      const auto work = [&](Buffer& buffer, const CallOptions& options) {
        return buffer.end_combine_elastic(back, options);
      };
      return self->hand_out_combined(self->run({}, work), {});
    };
    return py::make_tuple(py::cpp_function(add_up),
                          event_object(call.options, back.event, {&back.rows, &back.beside, &back.ends, &back.row_of}));
  }

  /// On the current stream; with `async_finish` on the communication stream, and it returns an event.
  py::object barrier(bool async_finish) {
    const CallOptions given{.async_finish = async_finish};
    return event_object(given,
                        run(given, [](Buffer& buffer, const CallOptions& options) { return buffer.barrier(options); }));
  }

  /// Memory for replicas of experts in the heap, once, before any other call: [bytes] uint8, the same on all ranks.
  py::object allocate_lb_storage(std::size_t bytes) {
    lb_storage_ = run({}, [&](Buffer& buffer, const CallOptions& options) {
      return buffer.allocate_tensor(DType::uint8, {static_cast<std::int64_t>(bytes)}, options.stream);
    });
    return lb_storage();
  }
  /// The same tensor, or None. Tensors over it keep the memory alive.
  py::object lb_storage() { return hand_out(lb_storage_); }

  // Low-latency calls.

  /// (rows or (rows, scales), recv_count, handle, event, hook): see deep_ep/buffer.py.
  py::tuple low_latency_dispatch(LowLatencyDispatchCall& call) {
    call.arguments.format = format_of(call);
    keep_for_hook(call);
    LowLatencyDispatchResult result = run(call, &Buffer::low_latency_dispatch);
    low_latency_dispatches_.add(call.arguments.x.bytes());
    py::object rows = hand_out(result.recv_x);
    if (result.recv_x_scales) rows = py::make_tuple(rows, hand_out(*result.recv_x_scales));
    const py::object event = event_object(call.options, result.event, {&result.handle.src_info});
    return py::make_tuple(std::move(rows), hand_out(result.recv_count), handles_.hand_out(std::move(result.handle)),
                          event, hook_object(std::move(result.hook)));
  }

  /// (combined_x, event, hook)
  py::tuple low_latency_combine(LowLatencyCombineCall& call) {
    const auto [keeper, dispatched] = handles_.find(call.handle);
    if (call.zero_copy) {
      if (call.arguments.use_logfmt) {
        throw InvalidArgument("zero_copy and use_logfmt are both true, allowed: at most one of them");
      }
      // A larger buffer may have taken its place since.
      const std::optional<TensorView>& lent = keeper->combine_buffer;
      const bool fits = lent && lent->size(2) == dispatched.hidden;
      const TensorView rows = fits ? *lent : alive().low_latency_combine_buffer(dispatched);
      check_zero_copy(call.arguments.x, rows);
      // A combine buffer that came has the rows, even if a larger one has taken its place since.
      if (!combine_buffers_.contains(call.arguments.x.data)) call.arguments.x = rows;
    }
    call.arguments.handle = &dispatched;
    keep_for_hook(call);
    if (call.out) call.arguments.out = call.out->view;
    if (call.overlaps) call.arguments.overlap = call.overlap;
    LowLatencyCombineResult result = run(call, &Buffer::low_latency_combine);
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
    run({}, [&](Buffer& buffer, const CallOptions& options) { buffer.low_latency_query_mask(status, options.stream); });
  }

  /// A uint8 tensor over memory of this rank that ends with the buffer.
  template <TensorView (Buffer::*memory)() const>
  py::object lent() {
    return lend((alive().*memory)());
  }

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
    const char* kind;
    std::uint64_t calls = 0, bytes = 0;
    void add(std::size_t more) { ++calls, bytes += more; }
  };

  bool on_cpu() const { return device_.kind == Device::Kind::cpu; }
  DispatchHandle borrow_handle(const py::tuple& handle) const {
    return bindings::borrow_handle(handle, device_, num_nodes_ > 1);
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
  /// A receive part that waits for its hook keeps the arguments of its call.
  template <class Call>
  void keep_for_hook(Call& call) const {
    if (!call.arguments.return_recv_hook) return;
    const auto let_go = [leftovers = leftovers_](void* object) {
      Leftovers::add(leftovers, static_cast<PyObject*>(object));
    };
    call.arguments.owner = {static_cast<void*>(py::object(call.given).release().ptr()), let_go};
  }
  /// None without `receive`.
  py::object hook_object(std::function<void()> receive) {
    if (!receive) return py::none();
    return py::cast(ReceiveHook{[self = shared_from_this(), receive = std::move(receive)] {
      // The buffer may have been destroyed since the send part.
      self->run({}, [&](Buffer&, const CallOptions&) { receive(); });
    }});
  }
  /// Waits for what is enqueued, or until the user interrupts it.
  void settle(Buffer& buffer) {
    try {
      executor_->synchronize(nullptr);
    } catch (const Interrupted&) {
      // The check that follows ends the call.
    }
    buffer.check();
    leftovers_->clear();
  }
  /// A tensor of memory that ends with the buffer.
  static py::object lend(const TensorView& view) { return hand_out(Tensor::borrow(view)); }

  void end(bool with_peers) {
    // Under the GIL: no other thread, as one that asks for metrics, finds the buffer that ends.
    std::shared_ptr<Buffer> found = std::exchange(buffer_, nullptr);
    std::optional<Tensor> storage = std::exchange(lb_storage_, std::nullopt);
    const py::gil_scoped_release released;
    std::shared_ptr<Buffer> ending = std::move(found);
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
  std::shared_ptr<Buffer> buffer_;
  int rank_ = 0, num_nodes_ = 1;
  std::optional<Tensor> lb_storage_;
  LowLatencyHandles handles_;
  std::set<const void*> combine_buffers_;  ///< that came to the program
  CallCount dispatches_{"dispatch"}, combines_{"combine"};
  CallCount low_latency_dispatches_{"low_latency_dispatch"}, low_latency_combines_{"low_latency_combine"};
};

// The methods by their names.

using BufferClass = py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>>;

/// A method whose arguments `list(with, call)` names.
template <class Result, class Call, class List>
void define_call(BufferClass& buffer, const char* name, const char* returns, Result (NativeBuffer::*method)(Call&),
                 const List& list) {
  buffer.def(
      name,
      [name, method, list](NativeBuffer& self, const py::args& given) {
        Call call;
        call.given = given;
        ArgumentReader::read_all(name, given, list, call);
        return (self.*method)(call);
      },
      SignatureWriter::write<Call>(name, returns, list).c_str());
}

/// A method of the library that may take its time; its last parameter may be the current stream.
template <auto method, class... Parameters>
void define(BufferClass& buffer, const char* name, const char* signature) {
  const auto call = [](NativeBuffer& self, const Parameters&... given) {
    self.run({}, [&](Buffer& alive, [[maybe_unused]] const CallOptions& options) {
      if constexpr (std::is_invocable_v<decltype(method), Buffer&, Parameters..., StreamHandle>) {
        (alive.*method)(given..., options.stream);
      } else {
        (alive.*method)(given...);
      }
    });
  };
  buffer.def(name, call, signature);
}

}  // namespace

void define_buffer(py::module_& module) {
  BufferClass buffer(module, "Buffer", "What deep_ep.Buffer is made of.");
  const auto setup_list = [](auto& with, BufferSetup& setup) {
    with("bootstrap", setup.bootstrap);
    with("device", setup.device);
    with("memory", setup.options.heap_bytes);
    with("window_bytes", setup.options.window_bytes);
    with("memory_between_nodes", setup.options.internode.heap_bytes);
    with("window_bytes_between_nodes", setup.options.internode.window_bytes);
    with("comm_stream", setup.comm_stream);
    with("low_latency_bytes", setup.options.low_latency.bytes);
    with("low_latency_masking", setup.options.low_latency.masking);
    with("allow_nvlink_for_low_latency", setup.options.low_latency.allow_nvlink);
    with("timeout_s", setup.options.timeout_s);
    with("num_qps_per_rank", setup.options.internode.num_qps_per_rank);
    with("results", setup.results);
  };
  buffer.def(py::init([setup_list](const py::args& given) {
               BufferSetup setup;
               ArgumentReader::read_all("Buffer", given, setup_list, setup);
               return std::make_shared<NativeBuffer>(setup);
             }),
             SignatureWriter::write<BufferSetup>("__init__", "None", setup_list).c_str());
  buffer.def("num_nodes", &NativeBuffer::num_nodes, "num_nodes(self, /) -> int");
  buffer.def("describe", &NativeBuffer::describe, "describe(self, /) -> str");
  buffer.def("metrics", &NativeBuffer::metrics, "metrics(self, /) -> Dict[str, Any]");

  const auto list_order = [](auto& with, auto& call) {
    with("previous_event", call.options.previous_event);
    with("async_finish", call.options.async_finish);
  };
  const auto list_elastic_order = [](auto& with, auto& call) {
    with("previous_event", call.options.previous_event);
    with("previous_event_before_epilogue", call.options.also_after);
    with("async_finish", call.options.async_finish);
  };
  define_call(buffer, "get_dispatch_layout",
              "Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, Optional[EventHandle]]",
              &NativeBuffer::get_dispatch_layout, [=](auto& with, Call<Selections>& call) {
                with("topk_idx", call.arguments.topk_idx);
                with("num_experts", call.arguments.num_experts);
                list_order(with, call);
              });
  // With a handle the six that follow say nothing.
  define_call(buffer, "dispatch",
              "Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], "
              "Optional[Tuple[torch.Tensor, ...]], Optional[EventHandle]]",
              &NativeBuffer::dispatch, [=](auto& with, DispatchCall& call) {
                DispatchArguments& arguments = call.arguments;
                with("x", call.x);
                with("handle", call.handle);
                with("is_token_in_rank", or_none(arguments.is_token_in_rank));
                with("num_tokens_per_expert", or_none(arguments.num_tokens_per_expert));
                with("topk_idx", arguments.topk_idx);
                with("topk_weights", arguments.topk_weights);
                with("expert_alignment", arguments.expert_alignment);
                with("num_worst_tokens", arguments.num_worst_tokens);
                with("num_sms", arguments.config.num_sms);
                list_order(with, call);
              });
  define_call(buffer, "combine", "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]",
              &NativeBuffer::combine, [=](auto& with, CombineCall& call) {
                CombineArguments& arguments = call.arguments;
                with("x", arguments.x);
                with("handle", call.handle);
                with("topk_weights", arguments.topk_weights);
                with("bias", Biases{arguments.bias_0, arguments.bias_1});
                with("num_sms", arguments.config.num_sms);
                list_order(with, call);
              });
  // With a route, the five that follow it are of the earlier dispatch, and some of what comes then says nothing.
  define_call(buffer, "dispatch_elastic",
              "Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], List[int], int, Any, Optional[EventHandle]]",
              &NativeBuffer::dispatch_elastic, [=](auto& with, ElasticDispatchCall& call) {
                ElasticDispatchArguments& arguments = call.arguments;
                with("x", call.x);
                with("route", call.route);
                with("metadata", or_none(call.earlier.metadata));
                with("source_ends", or_none(call.earlier.source_ends));
                with("local", or_none(call.earlier.local_topk_idx));
                with("expert_ends", or_none(call.earlier.expert_ends));
                with("num_expanded", call.earlier.num_expanded);
                with("topk_idx", or_none(arguments.topk_idx));
                with("topk_weights", arguments.topk_weights);
                with("cumulative_local_expert_recv_stats", arguments.stats);
                with("num_experts", arguments.num_experts);
                with("num_max_tokens_per_rank", arguments.max_tokens);
                with("expert_alignment", arguments.expert_alignment);
                with("exact", arguments.exact);
                with("expand", arguments.expand);
                with("zero_padding", arguments.zero_padding);
                with("column_major_scales", arguments.column_major_scales);
                with("copy_selections", arguments.copy_selections);
                with("num_sms", arguments.config.num_sms);
                list_elastic_order(with, call);
              });
  define_call(buffer, "combine_elastic", "Tuple[Any, ...]", &NativeBuffer::combine_elastic,
              [=](auto& with, ElasticCombineCall& call) {
                ElasticCombineArguments& arguments = call.arguments;
                with("deferred", call.deferred);
                with("x", arguments.x);
                with("metadata", arguments.metadata);
                with("source_ends", arguments.source_ends);
                with("topk_idx", arguments.topk_idx);
                with("rows_at_owners", arguments.rows_at_owners);
                with("num_experts", arguments.num_experts);
                with("num_max_tokens_per_rank", arguments.max_tokens);
                with("expanded", arguments.expanded);
                with("each_selection", arguments.each_selection);
                with("topk_weights", arguments.topk_weights);
                with("bias", Biases{arguments.bias_0, arguments.bias_1});
                with("num_sms", arguments.config.num_sms);
                list_elastic_order(with, call);
              });
  buffer.def("barrier", &NativeBuffer::barrier, "barrier(self, async_finish: bool, /) -> Any");
  buffer.def("allocate_lb_storage", &NativeBuffer::allocate_lb_storage,
             "allocate_lb_storage(self, bytes: int, /) -> Any");
  buffer.def_property_readonly("lb_storage", &NativeBuffer::lb_storage);
  define_call(buffer, "prefetch_weights", "Optional[EventHandle]",
              &NativeBuffer::event_of<&Buffer::prefetch_weights, WeightPrefetch>,
              [=](auto& with, Call<WeightPrefetch>& call) {
                with("redundant_expert_weights", call.arguments.redundant_expert_weights);
                with("expert_weights", call.arguments.expert_weights);
                with("redundancy_mapping", call.arguments.redundancy_mapping);
                with("num_sms", call.arguments.num_sms);
                list_order(with, call);
              });
  define_call(buffer, "reduce_grads", "Optional[EventHandle]",
              &NativeBuffer::event_of<&Buffer::reduce_grads, GradReduction>,
              [=](auto& with, Call<GradReduction>& call) {
                with("redundant_expert_grads", call.arguments.redundant_expert_grads);
                with("expert_grads", call.arguments.expert_grads);
                with("redundancy_mapping", call.arguments.redundancy_mapping);
                with("num_sms", call.arguments.num_sms);
                list_order(with, call);
              });
  buffer.def("local_memory", &NativeBuffer::lent<&Buffer::local_memory>, "local_memory(self, /) -> Any");
  define<&Buffer::check, bool>(buffer, "check", "check(self, wait: bool, /) -> None");
  define<&Buffer::suspend>(buffer, "suspend", "suspend(self, /) -> None");
  define<&Buffer::resume>(buffer, "resume", "resume(self, /) -> None");
  buffer.def("destroy", &NativeBuffer::destroy, "destroy(self, /) -> None");
  buffer.def("drop", &NativeBuffer::drop, "drop(self, /) -> None");

  define_call(buffer, "low_latency_dispatch",
              "Tuple[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], torch.Tensor, Tuple[Any, ...], "
              "Optional[EventHandle], Optional[ReceiveHook]]",
              &NativeBuffer::low_latency_dispatch, [](auto& with, LowLatencyDispatchCall& call) {
                LowLatencyDispatchArguments& arguments = call.arguments;
                with("x", arguments.x);
                with("topk_idx", arguments.topk_idx);
                with("num_max_dispatch_tokens_per_rank", arguments.max_tokens);
                with("num_experts", arguments.num_experts);
                with("cumulative_local_expert_recv_stats", arguments.cumulative_local_expert_recv_stats);
                with("dispatch_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
                with("use_fp8", call.use_fp8);
                with("round_scale", call.round_scale);
                with("use_ue8m0", call.use_ue8m0);
                with("async_finish", call.options.async_finish);
                with("return_recv_hook", arguments.return_recv_hook);
                with("arrival_counters", arguments.arrival_counters);
                with("arrival_rows", arguments.arrival_rows);
                with("use_nvfp4", call.use_nvfp4);
                with("x_global_scale", arguments.x_global_scale);
                with("align_fp8_quantization", call.align_fp8_quantization);
              });
  define_call(buffer, "low_latency_combine", "Tuple[torch.Tensor, Optional[EventHandle], Optional[ReceiveHook]]",
              &NativeBuffer::low_latency_combine, [](auto& with, LowLatencyCombineCall& call) {
                LowLatencyCombineArguments& arguments = call.arguments;
                with("x", arguments.x);
                with("topk_idx", arguments.topk_idx);
                with("topk_weights", arguments.topk_weights);
                with("handle", call.handle);
                with("use_logfmt", arguments.use_logfmt);
                with("zero_copy", call.zero_copy);
                with("out", call.out);
                with("combine_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
                with("async_finish", call.options.async_finish);
                with("return_recv_hook", arguments.return_recv_hook);
                with("overlaps", call.overlaps);
                with("signals", call.overlap.signals);
                with("signal_rows", call.overlap.signal_rows);
                with("expected", call.overlap.expected);
                with("num_sms", call.overlap.num_sms);
              });
  buffer.def("low_latency_combine_buffer", &NativeBuffer::low_latency_combine_buffer,
             "low_latency_combine_buffer(self, handle: Tuple[Any, ...], /) -> Any");
  buffer.def("low_latency_memory", &NativeBuffer::lent<&Buffer::low_latency_memory>,
             "low_latency_memory(self, /) -> Any");
  define<&Buffer::low_latency_clean>(buffer, "low_latency_clean", "low_latency_clean(self, /) -> None");
  define<&Buffer::low_latency_update_mask, int, bool>(
      buffer, "low_latency_update_mask", "low_latency_update_mask(self, rank: int, masked: bool, /) -> None");
  buffer.def("low_latency_query_mask", &NativeBuffer::low_latency_query_mask,
             "low_latency_query_mask(self, mask_status: torch.Tensor, /) -> None");
  define<&Buffer::low_latency_clear_mask>(buffer, "low_latency_clear_mask", "low_latency_clear_mask(self, /) -> None");
  define<&Buffer::low_latency_resume>(buffer, "low_latency_resume", "low_latency_resume(self, /) -> None");
  define<&Buffer::replace_ranks, std::shared_ptr<Bootstrap>, std::vector<int>>(
      buffer, "replace_ranks", "replace_ranks(self, group: Bootstrap, ranks: Sequence[int], /) -> None");
}

}  // namespace deep_ep::bindings
