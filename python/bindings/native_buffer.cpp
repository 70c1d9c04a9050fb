// A Buffer with Python objects as arguments. deep_ep/buffer.py puts the documented interface on top.
#include <fmt/format.h>
#include <pybind11/stl.h>  // ranks are a list of numbers

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
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

/// A handle that `call` returned, as far as its length says.
void check_length(const py::tuple& handle, std::size_t length, const char* call) {
  if (handle.size() == length) return;
  throw InvalidArgument(
      fmt::format("handle has {} elements, expected the tuple of {} that {} returned", handle.size(), length, call));
}

/// Rows of a call's arguments, and maybe their scales, which received ones look like.
struct SentRows {
  TensorArgument x;
  std::optional<TensorArgument> x_scales;

  template <class Arguments>
  SentRows(ArgumentReader& read, Arguments& arguments) {
    read("x", x);
    read("x_scales", x_scales);
    arguments.x = x.view;
    if (x_scales) arguments.x_scales = x_scales->view;
  }
  py::object hand_out(const Tensor& rows, const std::optional<Tensor>& scales) const {
    if (!scales) return as(rows, x);
    return py::make_tuple(as(rows, x), as(*scales, *x_scales));
  }
  static py::object as(const Tensor& tensor, const TensorArgument& like) {
    py::object made = bindings::hand_out(tensor);
    return like.renamed ? made.attr("view")(like.object.attr("dtype")) : made;
  }
};

/// The events that a call comes behind, and whether it leaves one.
CallOptions read_order(ArgumentReader& read, bool elastic = false) {
  CallOptions options;
  read("previous_event", options.previous_event);
  if (elastic) read("previous_event_before_epilogue", options.also_after);
  read("async_finish", options.async_finish);
  return options;
}

/// Upstream ignores some of them, and has use_fp8 on by default: these are no mistakes.
LowLatencyFormat format_of(bool use_fp8, bool round_scale, bool use_ue8m0, bool use_nvfp4,
                           bool align_fp8_quantization) {
  if (use_nvfp4) {
    if (!round_scale && !use_ue8m0) return LowLatencyFormat::nvfp4;
    throw InvalidArgument("use_nvfp4 is without round_scale and use_ue8m0: its scales are E4M3");
  }
  if (use_ue8m0) {
    if (use_fp8 && round_scale) return LowLatencyFormat::fp8_ue8m0;
    throw InvalidArgument("use_ue8m0 needs use_fp8 and round_scale: packed exponents hold powers of two only");
  }
  if (!use_fp8) return LowLatencyFormat::bf16;
  if (round_scale) return LowLatencyFormat::fp8_round_scale;
  return align_fp8_quantization ? LowLatencyFormat::fp8_aligned : LowLatencyFormat::fp8;
}

class NativeBuffer : public std::enable_shared_from_this<NativeBuffer> {
 public:
  /// Collective. `ordinal`: of a GPU, or -1 for the CPU. `comm_stream`: of the framework, it lives as long as the
  /// process; 0 on the CPU. `results`: deep_ep.results.Results. `given`: BufferOptions that are not at their defaults.
  NativeBuffer(const std::shared_ptr<Bootstrap>& bootstrap, int ordinal, std::uintptr_t comm_stream, py::object results,
               const py::kwargs& given) {
    BufferOptions options;
    options.comm_stream = reinterpret_cast<StreamHandle>(comm_stream);
    options.result_tensors = make_framework_results(std::move(results));
    const auto set = [&]<class T>(const char* name, T& place) {
      if (given.contains(name)) ArgumentReader::read(given[name], name, place);
    };
    set("memory", options.heap_bytes);  // of received tensors
    set("window_bytes", options.window_bytes);
    set("memory_between_nodes", options.internode.heap_bytes);
    set("low_latency_bytes", options.low_latency.bytes);
    set("low_latency_masking", options.low_latency.masking);
    set("allow_nvlink_for_low_latency", options.low_latency.allow_nvlink);
    set("timeout_s", options.timeout_s);
    set("num_qps_per_rank", options.internode.num_qps_per_rank);
    const auto executor = ordinal < 0 ? make_host_executor() : gpu_executor(ordinal);
    device_ = executor->device();
    if (!on_cpu()) gpu_ = executor.get();
    const py::gil_scoped_release released;
    buffer_ = std::make_shared<Buffer>(bootstrap, executor, options);
    rank_ = buffer_->rank();
    description_ = buffer_->describe();
  }
  ~NativeBuffer() { end(false); }
  NativeBuffer(const NativeBuffer&) = delete;
  NativeBuffer& operator=(const NativeBuffer&) = delete;

  Buffer& alive() const {
    if (!buffer_) throw UseAfterDestroy("the buffer was used after destroy");
    return *buffer_;
  }
  bool ended() const { return buffer_ == nullptr; }
  /// `work(buffer, options)` behind the current stream, so that other Python threads go on, even while the library
  /// waits for a peer. On the CPU all that the call has enqueued has ended afterwards.
  template <class Work>
  auto run(CallOptions options, const Work& work) {
    const std::shared_ptr<Buffer> holder = buffer_;  // another thread may destroy it meanwhile
    Buffer& buffer = alive();
    options.stream = current_stream(device_);
    // Events given to a buffer on the CPU have happened.
    if (on_cpu()) options.previous_event = options.also_after = nullptr;
    std::optional<py::error_already_set> raised;
    const SetWithin later(let_go_later, on_cpu() ? &leftovers_ : nullptr);
    const py::gil_scoped_release released;
    const InterruptScope interruptible([&] {
      if (raised) return true;
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() == 0) return false;
      raised.emplace();  // KeyboardInterrupt, or what another handler of signals raised
      return true;
    });
    try {
      auto result = work(buffer, options);
      if (on_cpu()) {
        buffer.check();
        const py::gil_scoped_acquire gil;
        let_go_of_leftovers();
      }
      return result;
    } catch (const std::exception&) {  // Interrupted, or what Python's exchanges made of it
      if (raised) throw py::error_already_set(*raised);
      throw;
    }
  }
  template <class Arguments, class Result>
  Result run(const CallOptions& options, const Arguments& arguments,
             Result (Buffer::*method)(const Arguments&, const CallOptions&)) {
    return run(options, [&](Buffer& buffer, const CallOptions& call) { return (buffer.*method)(arguments, call); });
  }
  /// The same; first reads num_sms, the events and async_finish.
  template <class Arguments, class Result>
  Result run(ArgumentReader& read, Arguments& arguments, Result (Buffer::*method)(const Arguments&, const CallOptions&),
             bool elastic = false) {
    read("num_sms", arguments.num_sms);
    return run(read_order(read, elastic), arguments, method);
  }

  /// For exporters, which may ask in a thread of their own: rank, ranks, nodes, lost_ranks, description, calls and
  /// bytes of each kind.
  py::dict metrics() {
    // Before Python makes an object: a finalizer that runs meanwhile may let another thread destroy the buffer.
    const int ranks = alive().num_ranks(), nodes = alive().num_nodes();
    const std::vector<int> lost = alive().lost_ranks();
    py::dict calls, bytes;
    for (const CallCount* each : {&dispatches_, &combines_, &low_latency_dispatches_, &low_latency_combines_}) {
      calls[each->kind] = each->calls;
      bytes[each->kind] = each->bytes;
    }
    return py::dict("rank"_a = rank_, "ranks"_a = ranks, "nodes"_a = nodes, "calls"_a = calls, "bytes"_a = bytes,
                    "lost_ranks"_a = lost, "description"_a = description_);
  }

  // Results that do not exist are None.

  /// (num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank, event)
  py::tuple get_dispatch_layout(ArgumentReader& read) {
    const auto topk_idx = read.get<ConstTensorView>("topk_idx");
    const int num_experts = read.get<int>("num_experts");
    const DispatchLayout layout = run(read_order(read), [&](Buffer& buffer, const CallOptions& call) {
      return buffer.get_dispatch_layout(topk_idx, num_experts, call);
    });
    return py::make_tuple(hand_out(layout.num_tokens_per_rank), hand_out(layout.num_tokens_per_node),
                          hand_out(layout.num_tokens_per_expert), hand_out(layout.is_token_in_rank),
                          event_object(layout.event));
  }

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, handle, event), with a handle None
  /// between the first and the last.
  py::tuple dispatch(ArgumentReader& read) {
    DispatchArguments arguments;
    const SentRows sent(read, arguments);
    const auto given = read.get<std::optional<py::tuple>>("handle");  // with it the six that follow say nothing
    if (given) arguments.handle = &in_handle(*given);
    read.if_given("is_token_in_rank", arguments.is_token_in_rank);
    read.if_given("num_tokens_per_expert", arguments.num_tokens_per_expert);
    read("topk_idx", arguments.topk_idx);
    read("topk_weights", arguments.topk_weights);
    read("expert_alignment", arguments.expert_alignment);
    read("num_worst_tokens", arguments.num_worst_tokens);
    const DispatchResult result = run(read, arguments, &Buffer::dispatch);
    dispatches_.add(arguments.x.bytes());
    py::object counts = py::none(), handle = py::none();
    if (!given) {
      counts = py::cast(result.num_recv_tokens_per_expert);
      handle = hand_out_handle(result.handle);
    }
    return py::make_tuple(sent.hand_out(result.recv_x, result.recv_x_scales), hand_out(result.recv_topk_idx),
                          hand_out(result.recv_topk_weights), counts, handle,
                          event_object(result.event, {&result.handle.rank_prefix_matrix}));
  }

  /// (combined_x, combined_topk_weights, event)
  py::tuple combine(ArgumentReader& read) {
    CombineArguments arguments;
    read("x", arguments.x);
    arguments.handle = &in_handle(read.get<py::tuple>("handle"));
    read("topk_weights", arguments.topk_weights);
    read("bias", arguments.bias_0);
    read("bias", arguments.bias_1);
    return hand_out_combined(run(read, arguments, &Buffer::combine));
  }

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, handle, event). The handle is a tuple: the copy of
  /// topk_idx, attributes of EPHandle from num_recv_tokens on, the route (inside a node there is none), local
  /// selections; None with a handle of an earlier dispatch.
  py::tuple dispatch_elastic(ArgumentReader& read) {
    ElasticDispatchArguments arguments;
    ElasticDispatchHandle earlier;
    const SentRows sent(read, arguments);
    // With it rows go where those of an earlier dispatch went, and some of what follows says nothing.
    const auto given = read.get<std::optional<py::tuple>>("handle");
    if (given) {
      ArgumentReader of(*given);
      const auto route = of.get<py::object>("route");
      if (py::isinstance<DispatchHandle>(route)) earlier.route = route.cast<const DispatchHandle&>();
      of("metadata", earlier.metadata);
      of("source_ends", earlier.source_ends);
      of("local", earlier.local_topk_idx);
      of.if_given("expert_ends", earlier.expert_ends);
      of("num_expanded", earlier.num_expanded);
      arguments.handle = &earlier;
    }
    read.if_given("topk_idx", arguments.topk_idx);
    read("topk_weights", arguments.topk_weights);
    read("cumulative_local_expert_recv_stats", arguments.stats);
    read("num_experts", arguments.num_experts);
    read("num_max_tokens_per_rank", arguments.max_tokens);
    read("expert_alignment", arguments.expert_alignment);
    read("exact", arguments.exact);
    read("expand", arguments.expand);
    read("zero_padding", arguments.zero_padding);
    read("column_major_scales", arguments.column_major_scales);
    read("copy_selections", arguments.copy_selections);
    const ElasticDispatchResult result = run(read, arguments, &Buffer::dispatch_elastic, true);
    dispatches_.add(arguments.x.bytes());
    const ElasticDispatchHandle& handle = result.handle;
    py::object made = py::none();
    if (!given) {
      made =
          py::make_tuple(hand_out(handle.topk_idx), handle.metadata.size(0), handle.num_expanded,
                         result.num_recv_tokens_per_expert, hand_out(handle.source_ends), hand_out(handle.expert_ends),
                         hand_out(handle.expert_counts), hand_out(handle.metadata), hand_out(handle.own_rows),
                         handle.route.destination_row.defined() ? py::cast(handle.route) : py::tuple(),
                         hand_out(handle.local_topk_idx));
    }
    return py::make_tuple(sent.hand_out(result.recv_x, result.recv_x_scales), hand_out(result.recv_topk_idx),
                          hand_out(result.recv_topk_weights), made, event_object(result.event, {&handle.metadata}));
  }

  /// (combined_x, combined_topk_weights, event). Deferred: (function, event); the sums are made when the function is
  /// called, which returns (combined_x, combined_topk_weights, None), and until then topk_idx and biases must live.
  py::tuple combine_elastic(ArgumentReader& read) {
    ElasticCombineArguments arguments;
    const bool deferred = read.get<bool>("deferred");
    read("x", arguments.x);
    read("metadata", arguments.metadata);
    read("source_ends", arguments.source_ends);
    read("topk_idx", arguments.topk_idx);
    read("own_rows", arguments.own_rows);
    read("num_experts", arguments.num_experts);
    read("num_max_tokens_per_rank", arguments.max_tokens);
    read("expanded", arguments.expanded);
    read("each_selection", arguments.each_selection);
    read("topk_weights", arguments.topk_weights);
    read("bias", arguments.bias_0);
    read("bias", arguments.bias_1);
    if (!deferred) return hand_out_combined(run(read, arguments, &Buffer::combine_elastic, true));
    const ElasticReturn back = run(read, arguments, &Buffer::begin_combine_elastic, true);
    const auto add_up = [self = shared_from_this(), back] {
      return self->hand_out_combined(self->run(CallOptions(), back, &Buffer::end_combine_elastic));
    };
    return py::make_tuple(py::cpp_function(add_up), event_object(back.event, {&back.rows, &back.beside, &back.ends}));
  }

  py::object prefetch_weights(ArgumentReader& read) {
    WeightPrefetch arguments;
    read("redundant_expert_weights", arguments.redundant_expert_weights);
    read("expert_weights", arguments.expert_weights);
    read("redundancy_mapping", arguments.redundancy_mapping);
    return event_object(run(read, arguments, &Buffer::prefetch_weights));
  }
  py::object reduce_grads(ArgumentReader& read) {
    GradReduction arguments;
    read("redundant_expert_grads", arguments.redundant_expert_grads);
    read("expert_grads", arguments.expert_grads);
    read("redundancy_mapping", arguments.redundancy_mapping);
    return event_object(run(read, arguments, &Buffer::reduce_grads));
  }

  /// On the current stream; with `async_finish` on the communication stream, and it returns an event.
  py::object barrier(bool async_finish) {
    return event_object(run({.async_finish = async_finish},
                            [](Buffer& buffer, const CallOptions& options) { return buffer.barrier(options); }));
  }

  /// Memory for replicas of experts in the heap, once, before any other call: [bytes] uint8, the same on all ranks.
  py::object allocate_lb_storage(std::int64_t bytes) {
    return hand_out(run({}, [&](Buffer& buffer, const CallOptions& options) {
      return buffer.allocate_tensor(DType::uint8, {bytes}, options.stream);
    }));
  }

  /// The hook of a call with return_recv_hook. The library keeps all that the receive part needs, also when the hook is
  /// dropped.
  struct ReceiveHook {
    std::shared_ptr<NativeBuffer> buffer;
    std::function<void()> receive;
  };
  /// (rows or (rows, scales), recv_count, handle, event, hook): see deep_ep/buffer.py.
  py::tuple low_latency_dispatch(ArgumentReader& read) {
    LowLatencyDispatchArguments arguments;
    CallOptions options;
    read("x", arguments.x);
    read("topk_idx", arguments.topk_idx);
    read("num_max_dispatch_tokens_per_rank", arguments.max_tokens);
    read("num_experts", arguments.num_experts);
    read("cumulative_local_expert_recv_stats", arguments.cumulative_local_expert_recv_stats);
    read("dispatch_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
    const bool use_fp8 = read.get<bool>("use_fp8");
    const bool round_scale = read.get<bool>("round_scale");
    const bool use_ue8m0 = read.get<bool>("use_ue8m0");
    read("async_finish", options.async_finish);
    read("return_recv_hook", arguments.return_recv_hook);
    read("arrival_counters", arguments.arrival_counters);
    read("arrival_rows", arguments.arrival_rows);
    const bool use_nvfp4 = read.get<bool>("use_nvfp4");
    read("x_global_scale", arguments.x_global_scale);
    const bool align_fp8_quantization = read.get<bool>("align_fp8_quantization");
    read("combine_weights", arguments.combine_weights);
    arguments.format = format_of(use_fp8, round_scale, use_ue8m0, use_nvfp4, align_fp8_quantization);
    if (arguments.return_recv_hook) arguments.owner = keep(read.given());  // for the part that waits for the hook
    LowLatencyDispatchResult result = run(options, arguments, &Buffer::low_latency_dispatch);
    low_latency_dispatches_.add(arguments.x.bytes());
    py::object rows = hand_out(result.recv_x);
    if (result.recv_x_scales) rows = py::make_tuple(rows, hand_out(*result.recv_x_scales));
    const py::object event = event_object(result.event, {&result.handle.src_info});
    return py::make_tuple(std::move(rows), hand_out(result.recv_count), hand_out_handle(std::move(result.handle)),
                          event, hook_object(std::move(result.hook)));
  }

  /// (combined_x, event, hook)
  py::tuple low_latency_combine(ArgumentReader& read) {
    LowLatencyCombineArguments arguments;
    CallOptions options;
    read("x", arguments.x);
    read("topk_idx", arguments.topk_idx);
    read("topk_weights", arguments.topk_weights);
    const auto dispatched = low_latency_handle(read.get<py::tuple>("handle"));
    arguments.handle = dispatched.get();
    const auto out = read.get<py::object>("out");
    ArgumentReader::read(out, "out", arguments.out);
    read("combine_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
    read("async_finish", options.async_finish);
    read("return_recv_hook", arguments.return_recv_hook);
    if (const auto overlap = read.get<std::optional<py::tuple>>("overlap")) {
      ArgumentReader of(*overlap);
      arguments.overlap.emplace();
      of("signals", arguments.overlap->signals);
      of("signal_rows", arguments.overlap->signal_rows);
      of("expected", arguments.overlap->expected);
      of("num_sms", arguments.overlap->num_sms);
    }
    if (arguments.return_recv_hook) arguments.owner = keep(read.given());  // for the part that waits for the hook
    LowLatencyCombineResult result = run(options, arguments, &Buffer::low_latency_combine);
    low_latency_combines_.add(result.combined_x.view().bytes());
    return py::make_tuple(out.is_none() ? hand_out(result.combined_x) : out, event_object(result.event),
                          hook_object(std::move(result.hook)));
  }

  /// Ends the buffer: with its peers, or alone. A second time it does nothing.
  void end(bool with_peers) {
    // Under the GIL: no other thread, as one that asks for metrics, finds the buffer that ends.
    std::shared_ptr<Buffer> ending = std::exchange(buffer_, nullptr);
    if (!ending) return;
    try {
      const py::gil_scoped_release released;
      if (with_peers) ending->destroy();
      ending.reset();
    } catch (...) {
      if (!ending->destroyed()) buffer_ = std::move(ending);  // another call uses it
      const py::gil_scoped_release released;
      ending.reset();
      throw;
    }
    let_go_of_leftovers();
  }

 private:
  /// With the GIL. Bytes: of the rows of this rank's tokens, as dispatch reads and combine writes them.
  struct CallCount {
    const char* kind;
    std::uint64_t calls = 0, bytes = 0;
    void add(std::size_t more) { ++calls, bytes += more; }
  };

  bool on_cpu() const { return device_.kind == Device::Kind::cpu; }

  // The handle of a dispatch as Python sees it, a tuple of seven. Upstream's tests read elements 0 and -4: where the
  // rows of each source end, on all ranks of a node and, between nodes, on this one. Element 1 is the library's handle,
  // and element 2 is a tensor that may be PyTorch's, so that PyTorch is told of the streams that use it.

  py::tuple hand_out_handle(const DispatchHandle& handle) const {
    const py::object matrix = hand_out(handle.rank_prefix_matrix);
    py::object ends = py::none();
    if (handle.node_row.defined()) ends = matrix.attr("select")(1, rank_ % handle.rank_prefix_matrix.size(1));
    // The last one has memory of its own: a stream that it was used on counts when it goes.
    return py::make_tuple(matrix, handle, hand_out(handle.recv_src_idx), ends, py::none(), py::none(),
                          hand_out(handle.relay_rows));
  }
  static const DispatchHandle& in_handle(const py::tuple& handle) {
    check_length(handle, 7, "dispatch");
    const py::object element = handle[1];
    if (py::isinstance<DispatchHandle>(element)) return element.cast<const DispatchHandle&>();
    throw InvalidArgument(
        fmt::format("handle[1] is of type {}, expected what dispatch returned", Py_TYPE(element.ptr())->tp_name));
  }

  // The handle of a low-latency dispatch as Python sees it: (src_info, layout_range, M, H, E). Combine needs more than
  // that. Programs take the tuple apart and build others from its elements, so the rest hangs on src_info: its memory
  // keeps the whole handle, which is found again by the memory's address.

  py::tuple hand_out_handle(LowLatencyHandle handle) {
    const auto kept = std::make_shared<const LowLatencyHandle>(std::move(handle));
    low_latency_handles_.insert_or_assign(kept->src_info.data(), kept);
    const Tensor keeper(kept->src_info.view(), {kept, kept->src_info.storage().get()});
    return py::make_tuple(hand_out(keeper), hand_out(kept->layout_range), kept->max_tokens, kept->hidden,
                          kept->num_experts);
  }
  /// Of a handle, whose other elements than src_info say nothing.
  std::shared_ptr<const LowLatencyHandle> low_latency_handle(const py::tuple& handle) const {
    check_length(handle, 5, "low_latency_dispatch");
    const TensorView src_info = view_of(handle[0], "handle[0]");
    const auto found = low_latency_handles_.find(src_info.data);
    if (found != low_latency_handles_.end()) {
      if (auto kept = found->second.lock()) return kept;
    }
    throw InvalidArgument(
        fmt::format("handle[0] is {}, but not the tensor that this buffer's low_latency_dispatch "
                    "returned (a copy does not do: combine needs what lies behind it)",
                    src_info.describe()));
  }

  py::tuple hand_out_combined(const CombineResult& result) {
    combines_.add(result.combined_x.view().bytes());
    return py::make_tuple(hand_out(result.combined_x), hand_out(result.combined_topk_weights),
                          event_object(result.event));
  }
  /// Without async_finish there is none. `kept`: results that are memory of the library, as the tables of handles are.
  py::object event_object(EventHandle event, std::initializer_list<const Tensor*> kept = {}) const {
    if (!event) return py::none();
    Event made{gpu_, on_cpu() ? nullptr : std::move(event)};
    for (const Tensor* tensor : kept) made.kept.emplace_back(tensor->storage());
    return py::cast(std::move(made));
  }
  py::object hook_object(std::function<void()> receive) {
    if (!receive) return py::none();
    return py::cast(ReceiveHook{shared_from_this(), std::move(receive)});
  }
  void let_go_of_leftovers() { const auto ended = std::exchange(leftovers_, {}); }

  Device device_;
  Executor* gpu_ = nullptr;  ///< of gpu_executor
  /// On the CPU, of calls whose work has not ended, with the GIL.
  std::vector<py::object> leftovers_;
  std::shared_ptr<Buffer> buffer_;
  int rank_ = 0;
  std::string description_;  ///< of when it was made: another thread may be making new connections now
  /// By the address of src_info. An entry lasts until the memory is that of another handle.
  std::unordered_map<const void*, std::weak_ptr<const LowLatencyHandle>> low_latency_handles_;
  CallCount dispatches_{"dispatch"}, combines_{"combine"};
  CallCount low_latency_dispatches_{"low_latency_dispatch"}, low_latency_combines_{"low_latency_combine"};
};

using BufferClass = py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>>;

/// A method that reads its arguments itself.
template <class Result>
void define_call(BufferClass& buffer, const char* name, Result (NativeBuffer::*method)(ArgumentReader&)) {
  buffer.def(name, [method](NativeBuffer& self, const py::args& given) {
    ArgumentReader read(given);
    return (self.*method)(read);
  });
}

/// A method of the library that may take its time; its last parameter may be the current stream. `names`: of the
/// others.
template <auto method, class... Parameters, class... Names>
void define(BufferClass& buffer, const char* name, Names... names) {
  buffer.def(name, [names...](NativeBuffer& self, const py::args& given) {
    ArgumentReader read(given);
    const std::tuple<Parameters...> arguments{read.get<Parameters>(names)...};
    self.run({}, [&](Buffer& alive, const CallOptions& options) {
      if constexpr (std::is_invocable_v<decltype(method), Buffer&, Parameters..., StreamHandle>) {
        std::apply(method, std::tuple_cat(std::tie(alive), arguments, std::tie(options.stream)));
      } else {
        std::apply(method, std::tuple_cat(std::tie(alive), arguments));
      }
      return true;
    });
  });
}

}  // namespace

void define_buffer(py::module_& module) {
  py::class_<DispatchHandle>(module, "Route", "Where the rows of a dispatch went.");
  using ReceiveHook = NativeBuffer::ReceiveHook;
  py::class_<ReceiveHook>(module, "ReceiveHook", "Enqueues the receive part of a low-latency call. Call it once.")
      .def("__call__", [](const ReceiveHook& hook) {
        hook.buffer->run({}, [&](Buffer&, const CallOptions&) { return hook.receive(), true; });
      });
  BufferClass buffer(module, "Buffer", py::dynamic_attr(), "What deep_ep.Buffer is made of.");
  buffer.def(py::init<const std::shared_ptr<Bootstrap>&, int, std::uintptr_t, py::object, const py::kwargs&>());
  buffer.def("num_nodes", [](const NativeBuffer& self) { return self.alive().num_nodes(); });
  buffer.def("describe", [](const NativeBuffer& self) { return self.alive().describe(); });
  buffer.def("metrics", &NativeBuffer::metrics);
  define_call(buffer, "get_dispatch_layout", &NativeBuffer::get_dispatch_layout);
  define_call(buffer, "dispatch", &NativeBuffer::dispatch);
  define_call(buffer, "combine", &NativeBuffer::combine);
  define_call(buffer, "dispatch_elastic", &NativeBuffer::dispatch_elastic);
  define_call(buffer, "combine_elastic", &NativeBuffer::combine_elastic);
  buffer.def("barrier", &NativeBuffer::barrier);
  buffer.def("allocate_lb_storage", &NativeBuffer::allocate_lb_storage);
  define_call(buffer, "prefetch_weights", &NativeBuffer::prefetch_weights);
  define_call(buffer, "reduce_grads", &NativeBuffer::reduce_grads);
  // Of memory that ends with the buffer.
  buffer.def("local_memory",
             [](const NativeBuffer& self) { return hand_out(Tensor::borrow(self.alive().local_memory())); });
  define<&Buffer::check, bool>(buffer, "check", "wait");
  define<&Buffer::suspend>(buffer, "suspend");
  define<&Buffer::resume>(buffer, "resume");
  buffer.def("destroy", [](NativeBuffer& self) { self.end(true); });
  buffer.def_property_readonly("ended", &NativeBuffer::ended);
  buffer.def("drop", [](NativeBuffer& self) { self.end(false); });

  define_call(buffer, "low_latency_dispatch", &NativeBuffer::low_latency_dispatch);
  define_call(buffer, "low_latency_combine", &NativeBuffer::low_latency_combine);
  buffer.def("low_latency_memory",
             [](const NativeBuffer& self) { return hand_out(Tensor::borrow(self.alive().low_latency_memory())); });
  define<&Buffer::low_latency_clean>(buffer, "low_latency_clean");
  define<&Buffer::low_latency_update_mask, int, bool>(buffer, "low_latency_update_mask", "rank_to_mask", "mask");
  define<&Buffer::low_latency_query_mask, TensorView>(buffer, "low_latency_query_mask", "mask_status");
  define<&Buffer::low_latency_clear_mask>(buffer, "low_latency_clear_mask");
  define<&Buffer::low_latency_resume>(buffer, "low_latency_resume");
  define<&Buffer::replace_ranks, std::shared_ptr<Bootstrap>, std::vector<int>>(buffer, "replace_ranks", "group",
                                                                               "ranks");
}

}  // namespace deep_ep::bindings
