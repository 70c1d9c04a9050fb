// Arguments of the calls of deep_ep._native. Each is spelled once: a call lists its arguments by name, with the place
// that the value goes to. From the list come the reading of what Python gives and the signature in the docstring, of
// which deep_ep/_native.pyi is made.
#pragma once

#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// Rows of any element type, or (8-bit rows, their scales).
struct RowsArgument {
  AnyTensor rows;
  std::optional<AnyTensor> scales;
};
/// Places of tensors that combine adds once: one, or two of which either may be missing.
struct Biases {
  std::optional<ConstTensorView>&first, &second;
};

/// Of an earlier dispatch of the second interface, for one whose rows go where those went.
struct ElasticHandleArgument {
  py::tuple route;
  std::optional<Tensor> expert_ends;
  bool indices_are_64_bit = true;
  ElasticDispatchHandle handle;

  template <class With>
  void list(With& with) {
    with("route", route);
    with("metadata", handle.metadata);
    with("source_ends", handle.source_ends);
    with("local", handle.local_topk_idx);
    with("expert_ends", expert_ends);
    with("num_expanded", handle.num_expanded);
    with("indices_are_64_bit", indices_are_64_bit);
  }
};

/// Puts positional arguments into their places, in the order of the list. TypeError names the argument.
class ArgumentReader {
 public:
  template <class Call>
  static void read_call(const char* name, const py::args& given, Call& call) {
    ArgumentReader reader(name, given);
    call.list(reader);
    if (reader.next_ != given.size()) reader.wrong_number();
  }

  template <class T>
  void operator()(const char* name, T&& place) {
    if (next_ == given_.size()) wrong_number();
    read(PyTuple_GET_ITEM(given_.ptr(), static_cast<py::ssize_t>(next_++)), name, place);
  }

 private:
  ArgumentReader(const char* call, const py::args& given) : call_(call), given_(given) {}

  static void read(py::handle object, const char* name, AnyTensor& place) {
    static_cast<TensorArgument&>(place) = Framework::instance().borrow(object, name, Accept::any_type);
  }
  static void read(py::handle object, const char* name, TensorArgument& place) {
    place = Framework::instance().borrow(object, name);
  }
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, View& place) {
    place = Framework::instance().borrow(object, name).view;
  }
  static void read(py::handle object, const char* name, Tensor& place) {
    place = Tensor::borrow(Framework::instance().borrow(object, name).view);
  }
  static void read(py::handle object, const char* name, ElasticHandleArgument& place) {
    if (!PyTuple_Check(object.ptr())) wrong_type(object, name, "a tuple");
    read_call(name, py::reinterpret_borrow<py::args>(object), place);
  }
  template <class T>
  static void read(py::handle object, const char* name, std::optional<T>& place) {
    if (!object.is_none()) read(object, name, place.emplace());
  }
  static void read(py::handle object, const char* name, RowsArgument& place) {
    const auto pair = pair_of(object, name, "(rows, scales)");
    if (!pair) return read(object, name, place.rows);
    read(pair->first, name, place.rows);
    read(pair->second, "x_scales", place.scales.emplace());
  }
  static void read(py::handle object, const char* name, Biases& place) {
    const auto pair = pair_of(object, name, "two");
    read(pair ? py::handle(pair->first) : object, name, place.first);
    if (pair) read(pair->second, name, place.second);
    if (!place.first) std::swap(place.first, place.second);
  }
  /// The elements of a list or tuple, which must be of two; nothing for other objects.
  static std::optional<std::pair<py::object, py::object>> pair_of(py::handle object, const char* name,
                                                                  const char* elements) {
    if (!PyTuple_Check(object.ptr()) && !PyList_Check(object.ptr())) return std::nullopt;
    const auto given = py::reinterpret_borrow<py::sequence>(object);
    if (given.size() == 2) return std::pair<py::object, py::object>(given[0], given[1]);
    throw InvalidArgument(fmt::format("{} is a {} of {}, expected a tensor or {}", name, Py_TYPE(object.ptr())->tp_name,
                                      given.size(), elements));
  }
  /// A list or tuple of tensors.
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, std::vector<View>& place) {
    if (!py::isinstance<py::sequence>(object)) wrong_type(object, name, "a list of tensors");
    for (const py::handle each : py::reinterpret_borrow<py::sequence>(object)) {
      const std::string of_list = std::string(name) + "[" + std::to_string(place.size()) + "]";
      place.push_back(Framework::instance().borrow(each, of_list.c_str()).view);
    }
  }
  /// None, an Event, or an object with one or None as its `event`.
  static void read(py::handle object, const char* name, EventHandle& place) {
    if (object.is_none()) return;
    auto event = py::reinterpret_borrow<py::object>(object);
    if (!py::isinstance<Event>(object)) {
      event = py::getattr(object, "event", py::int_());
      if (event.is_none()) return;
      if (!py::isinstance<Event>(event)) wrong_type(object, name, "None, an EventOverlap or an EventHandle");
    }
    place = event.cast<const Event&>().event();
  }
  /// Numbers, truth values and Python's own containers.
  template <class T>
  static void read(py::handle object, const char* name, T& place) {
    py::detail::make_caster<T> caster;
    if (!caster.load(object, true)) wrong_type(object, name, expected_text<T>());
    place = py::detail::cast_op<T>(std::move(caster));
  }
  /// The forms in which a value of type T may be given, in words.
  template <class T>
  static constexpr const char* expected_text() {
    if constexpr (std::is_same_v<T, bool>) return "True or False";
    if constexpr (std::is_integral_v<T>) return kInteger;
    if constexpr (std::is_floating_point_v<T>) return "a number";
    if constexpr (std::is_same_v<T, std::shared_ptr<Bootstrap>>) return "a Bootstrap";
    return "a tuple";
  }
  [[noreturn]] static void wrong_type(py::handle object, const char* name, const std::string& expected) {
    if (PyLong_Check(object.ptr()) && expected == kInteger) {
      throw InvalidArgument(fmt::format("{} is {}, which is out of range", name, std::string(py::str(object))));
    }
    throw py::type_error(fmt::format("{} is of type {}, expected {}", name, Py_TYPE(object.ptr())->tp_name, expected));
  }
  [[noreturn]] void wrong_number() const {
    throw py::type_error(
        fmt::format("{} got {} arguments, which is not what its signature says", call_, given_.size()));
  }

  static constexpr const char* kInteger = "an integer";

  const char* call_;
  const py::args& given_;
  std::size_t next_ = 0;
};

/// The name of T in _native.pyi. Objects about which nothing else is known are tensors.
template <class T>
std::string python_type() {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (std::is_void_v<Plain>) return "None";
  if constexpr (std::is_same_v<Plain, bool>) return "bool";
  if constexpr (std::is_integral_v<Plain>) return "int";
  if constexpr (std::is_floating_point_v<Plain>) return "float";
  if constexpr (std::is_same_v<Plain, std::string>) return "str";
  if constexpr (std::is_same_v<Plain, EventHandle>) return "Any";
  if constexpr (std::is_same_v<Plain, RowsArgument>) return "Union[torch.Tensor, Sequence[torch.Tensor]]";
  if constexpr (std::is_same_v<Plain, Biases>) return "Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]]";
  if constexpr (std::is_same_v<Plain, py::tuple> || std::is_same_v<Plain, ElasticHandleArgument>) {
    return "Tuple[Any, ...]";
  }
  if constexpr (std::is_same_v<Plain, std::shared_ptr<Bootstrap>>) return "Bootstrap";
  if constexpr (std::is_same_v<Plain, py::object>) return "Any";
  if constexpr (std::is_same_v<Plain, py::dict>) return "Dict[str, Any]";
  if constexpr (std::is_same_v<Plain, std::vector<int>>) return "Sequence[int]";
  if constexpr (requires { typename Plain::allocator_type; }) return "Sequence[torch.Tensor]";
  if constexpr (requires { typename Plain::value_type; }) {
    return "Optional[" + python_type<typename Plain::value_type>() + "]";
  }
  return "torch.Tensor";
}

/// "name(self, x: torch.Tensor, num_sms: int, /) -> None": all are given by position.
struct SignatureWriter {
  std::string parameters;

  template <class T>
  void operator()(const char* name, const T& /*place*/) {
    add(name, python_type<T>());
  }
  void add(const std::string& name, const std::string& type) { parameters += name + ": " + type + ", "; }
  std::string finish(const std::string& name, const std::string& returns) const {
    return name + "(" + parameters + (parameters.empty() ? "" : "/") + ") -> " + returns;
  }
};

/// The signature of a call that lists its arguments.
template <class Call>
std::string signature_of_call(const char* name, const std::string& returns) {
  SignatureWriter writer{"self, "};
  Call().list(writer);
  return writer.finish(name, returns);
}

/// The signature of a function or method whose parameters have these names.
template <class Result, class... Parameters>
std::string signature_of(const char* name, std::initializer_list<const char*> names, bool method) {
  SignatureWriter writer{method ? "self, " : ""};
  [[maybe_unused]] auto next = names.begin();
  (writer.add(*next++, python_type<Parameters>()), ...);
  return writer.finish(name, python_type<Result>());
}

// The arguments of each call of a Buffer.

struct BufferSetup {
  std::shared_ptr<Bootstrap> bootstrap;
  int device = -1;                 ///< a GPU's ordinal, -1 for the CPU
  std::uintptr_t comm_stream = 0;  ///< of the framework, lives as long as the process; 0 on the CPU
  double timeout_s = -1;           ///< below 0: DEEP_EP_TIMEOUT_S
  py::object results;              ///< deep_ep.results.Results
  BufferOptions options;           ///< heap_bytes: of received tensors

  template <class With>
  void list(With& with) {
    with("bootstrap", bootstrap);
    with("device", device);
    with("memory", options.heap_bytes);
    with("window_bytes", options.window_bytes);
    with("memory_between_nodes", options.internode.heap_bytes);
    with("window_bytes_between_nodes", options.internode.window_bytes);
    with("comm_stream", comm_stream);
    with("low_latency_bytes", options.low_latency.bytes);
    with("low_latency_masking", options.low_latency.masking);
    with("allow_nvlink_for_low_latency", options.low_latency.allow_nvlink);
    with("timeout_s", timeout_s);
    with("num_qps_per_rank", options.internode.num_qps_per_rank);
    with("results", results);
  }
};

/// All of them but the first.
struct CallOfBuffer {
  CallOptions options;
  py::args given;  ///< all arguments, for what must keep them
};

struct LayoutCall : CallOfBuffer {
  static constexpr const char* kReturns =
      "Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, Optional[EventHandle]]";
  ConstTensorView topk_idx;
  int num_experts = 0;

  template <class With>
  void list(With& with) {
    with("topk_idx", topk_idx);
    with("num_experts", num_experts);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct DispatchCall : CallOfBuffer {
  static constexpr const char* kReturns =
      "Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], "
      "Optional[Tuple[torch.Tensor, ...]], Optional[EventHandle]]";
  RowsArgument x;
  std::optional<py::tuple> handle;  ///< with it the six that follow say nothing
  std::optional<ConstTensorView> num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank;
  DispatchArguments arguments;

  template <class With>
  void list(With& with) {
    with("x", x);
    with("handle", handle);
    with("num_tokens_per_rank", num_tokens_per_rank);
    with("is_token_in_rank", is_token_in_rank);
    with("num_tokens_per_expert", num_tokens_per_expert);
    with("topk_idx", arguments.topk_idx);
    with("topk_weights", arguments.topk_weights);
    with("expert_alignment", arguments.expert_alignment);
    with("num_worst_tokens", arguments.num_worst_tokens);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct CombineCall : CallOfBuffer {
  static constexpr const char* kReturns = "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]";
  py::tuple handle;
  CombineArguments arguments;

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("handle", handle);
    with("topk_weights", arguments.topk_weights);
    with("bias", Biases{arguments.bias_0, arguments.bias_1});
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct ElasticDispatchCall : CallOfBuffer {
  static constexpr const char* kReturns =
      "Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], List[int], int, Any, Optional[EventHandle]]";
  RowsArgument x;
  std::optional<ElasticHandleArgument> handle;  ///< with it some of what follows says nothing
  std::optional<ConstTensorView> topk_idx;
  ElasticDispatchArguments arguments;

  template <class With>
  void list(With& with) {
    with("x", x);
    with("handle", handle);
    with("topk_idx", topk_idx);
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
    with("previous_event", options.previous_event);
    with("previous_event_before_epilogue", options.also_after);
    with("async_finish", options.async_finish);
  }
};

struct ElasticCombineCall : CallOfBuffer {
  static constexpr const char* kReturns = "Tuple[Any, ...]";
  bool deferred = false;  ///< the sums are made when the function is called that comes instead of results
  ElasticCombineArguments arguments;

  template <class With>
  void list(With& with) {
    with("deferred", deferred);
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
    with("previous_event", options.previous_event);
    with("previous_event_before_epilogue", options.also_after);
    with("async_finish", options.async_finish);
  }
};

struct PrefetchWeightsCall : CallOfBuffer {
  static constexpr const char* kReturns = "Optional[EventHandle]";
  WeightPrefetch weights;

  template <class With>
  void list(With& with) {
    with("redundant_expert_weights", weights.redundant_expert_weights);
    with("expert_weights", weights.expert_weights);
    with("redundancy_mapping", weights.redundancy_mapping);
    with("num_sms", weights.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct ReduceGradsCall : CallOfBuffer {
  static constexpr const char* kReturns = "Optional[EventHandle]";
  GradReduction grads;

  template <class With>
  void list(With& with) {
    with("redundant_expert_grads", grads.redundant_expert_grads);
    with("expert_grads", grads.expert_grads);
    with("redundancy_mapping", grads.redundancy_mapping);
    with("num_sms", grads.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct LowLatencyDispatchCall : CallOfBuffer {
  static constexpr const char* kReturns =
      "Tuple[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], torch.Tensor, Tuple[Any, ...], "
      "Optional[EventHandle], Optional[ReceiveHook]]";
  bool use_fp8 = true, round_scale = false, use_ue8m0 = false, use_nvfp4 = false, align_fp8_quantization = false;
  LowLatencyDispatchArguments arguments;

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("topk_idx", arguments.topk_idx);
    with("num_max_dispatch_tokens_per_rank", arguments.max_tokens);
    with("num_experts", arguments.num_experts);
    with("cumulative_local_expert_recv_stats", arguments.cumulative_local_expert_recv_stats);
    with("dispatch_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
    with("use_fp8", use_fp8);
    with("round_scale", round_scale);
    with("use_ue8m0", use_ue8m0);
    with("async_finish", options.async_finish);
    with("return_recv_hook", arguments.return_recv_hook);
    with("arrival_counters", arguments.arrival_counters);
    with("arrival_rows", arguments.arrival_rows);
    with("use_nvfp4", use_nvfp4);
    with("x_global_scale", arguments.x_global_scale);
    with("align_fp8_quantization", align_fp8_quantization);
  }
};

struct LowLatencyCombineCall : CallOfBuffer {
  static constexpr const char* kReturns = "Tuple[torch.Tensor, Optional[EventHandle], Optional[ReceiveHook]]";
  py::tuple handle;
  bool zero_copy = false;
  std::optional<TensorArgument> out;
  bool overlaps = false;
  LowLatencyOverlap overlap;
  LowLatencyCombineArguments arguments;

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("topk_idx", arguments.topk_idx);
    with("topk_weights", arguments.topk_weights);
    with("handle", handle);
    with("use_logfmt", arguments.use_logfmt);
    with("zero_copy", zero_copy);
    with("out", out);
    with("combine_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
    with("async_finish", options.async_finish);
    with("return_recv_hook", arguments.return_recv_hook);
    with("overlaps", overlaps);
    with("signals", overlap.signals);
    with("signal_rows", overlap.signal_rows);
    with("expected", overlap.expected);
    with("num_sms", overlap.num_sms);
  }
};

}  // namespace deep_ep::bindings
