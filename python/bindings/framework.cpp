#include "python/bindings/framework.hpp"

#include <fmt/format.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

// The part of the DLPack 1.x binary interface that tensors cross: layouts only, no framework's header.
// https://dmlc.github.io/dlpack
namespace deep_ep::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
struct Device {
  DeviceType type;
  std::int32_t index;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kOpaque = 3,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 12,
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct TensorInfo {  // DLTensor
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensor: what a capsule named "dltensor" holds
  TensorInfo tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

/// DLPackExchangeAPI: a table of C functions of a framework, to ask it without Python calls. Results other than 0 mean
/// that a Python exception is set.
struct ExchangeApi {
  Version version;
  const ExchangeApi* previous;
  void (*not_used[3])();                                   ///< that make tensors
  int (*info_from_object)(void* object, TensorInfo* out);  ///< borrows; may be missing
  int (*current_stream)(DeviceType type, std::int32_t index, void** out);
};

}  // namespace deep_ep::dlpack

namespace deep_ep::bindings {
namespace {

constexpr int kMaxDims = TensorView::kMaxDims;

struct KnownType {
  const char* name;  ///< in torch
  dlpack::DataType dtype;
};
/// In the order of DType.
constexpr std::array<KnownType, static_cast<std::size_t>(DType::float8_e5m2) + 1> kTypes = {{
    {"bool", {dlpack::kBool, 8, 1}},
    {"uint8", {dlpack::kUInt, 8, 1}},
    {"int32", {dlpack::kInt, 32, 1}},
    {"int64", {dlpack::kInt, 64, 1}},
    {"float32", {dlpack::kFloat, 32, 1}},
    {"bfloat16", {dlpack::kBfloat, 16, 1}},
    {"float16", {dlpack::kFloat, 16, 1}},
    {"float8_e4m3fn", {dlpack::kFloat8E4m3fn, 8, 1}},
    {"float8_e5m2", {dlpack::kFloat8E5m2, 8, 1}},
}};

/// The types that an argument may have, for messages; empty for a name that is not listed. `any`: where rows of any
/// type may be sent.
std::string types_of(std::string_view name, bool any) {
  if (name == "x_scales") return "float32 or int32";
  if (any && name.starts_with("x")) return "types of 1, 2, 4 or 8 bytes";
  constexpr std::pair<std::string_view, const char*> kAllowed[] = {{"topk_idx", "int32 or int64"},
                                                                   {"is_token_in_rank", "bool"},
                                                                   {"x", "bfloat16"},
                                                                   {"out", "bfloat16"},
                                                                   {"bias", "bfloat16"},
                                                                   {"arrival_counters", "int64"},
                                                                   {"redundancy_mapping", "int32"},
                                                                   {"x_global_scale", "float32"}};
  for (const auto& [argument, types] : kAllowed) {
    if (name == argument) return types;
  }
  if (name.ends_with("_weights") && !name.ends_with("expert_weights")) return "float32";
  if (name.ends_with("wait_recv_cost_stats")) return "int64";
  if (name.ends_with("local_expert_recv_stats")) return "int32";
  if (name.ends_with("expert_weights") || name.ends_with("expert_grads")) return "types of 1, 2, 4 or 8 bytes";
  return {};
}

/// The name of torch.float64, say, without the module.
std::string name_of_dtype(py::handle object) {
  const std::string dtype = py::str(object.attr("dtype"));
  return dtype.substr(dtype.find('.') + 1);
}

[[noreturn]] void refuse_dtype(py::handle object, const char* name, const std::string& allowed) {
  const std::string dtype = name_of_dtype(object);
  if (allowed.empty()) throw InvalidArgument(fmt::format("{} has dtype {}, which it cannot have", name, dtype));
  throw InvalidArgument(fmt::format("{} has dtype {}, allowed: {}", name, dtype, allowed));
}

/// Of classes whose objects have no memory of their own: what a program gives instead.
constexpr std::pair<std::string_view, const char*> kWithoutMemory[] = {
    {"AsyncCollectiveTensor", "pass the result of its wait()"},
    {"DTensor", "pass the result of its to_local()"},
    {"FakeTensor", "it has no values; where PyTorch traces, call deep_ep.ops"},
};
[[noreturn]] void refuse_class(py::handle object, const char* name, const char* remedy) {
  throw InvalidArgument(
      fmt::format("{} must be a plain tensor, got one of class {}: {}", name, Py_TYPE(object.ptr())->tp_name, remedy));
}

/// Before its memory is asked for, which some of these classes answer with a warning.
void check_class(py::handle object, const char* name) {
  for (const PyTypeObject* each = Py_TYPE(object.ptr()); each != nullptr; each = each->tp_base) {
    for (const auto& [of_class, remedy] : kWithoutMemory) {
      if (each->tp_name == of_class) refuse_class(object, name, remedy);
    }
  }
}
[[noreturn]] void refuse_without_memory(py::handle object, const char* name) {
  refuse_class(object, name,
               "it has no memory of its own, as inside torch.vmap or for some subclasses; pass one that has");
}

/// A tensor that has no memory to send from: on another kind of device, sparse, or only a shape ("meta").
[[noreturn]] void refuse_storage(py::handle object, const char* name) {
  const std::string device = py::str(object.attr("device")), layout = py::str(object.attr("layout"));
  if (!object.attr("is_cuda").cast<bool>() && !object.attr("is_cpu").cast<bool>()) {
    throw InvalidArgument(fmt::format("{} lies on a device that is neither CPU nor CUDA: {}", name, device));
  }
  if (layout != "torch.strided") {
    throw InvalidArgument(fmt::format("{} has layout {}, allowed: torch.strided", name, layout));
  }
  const std::string dtype = name_of_dtype(object);  // bits, quantized: DLPack has no word for them
  if (std::ranges::none_of(kTypes, [&](const KnownType& type) { return dtype == type.name; })) {
    refuse_dtype(object, name, types_of(name, true));
  }
  refuse_without_memory(object, name);
}

/// The functions that the bindings ask of PyTorch. nullptr: this PyTorch does not have it.
struct Torch {
  PyTypeObject* tensor_type;
  const dlpack::ExchangeApi* exchange = nullptr;
  py::object from_capsule;
  py::object raw_stream;
  py::object empty_strided;
  py::object quick_empty_on_cpu;  ///< what compiled programs of PyTorch call: in half the time
  py::object quick_empty_on_gpu;
  py::object as_strided;
  py::object is_neg;
  py::object is_conj;
  py::object modes;  ///< how many modes would see a call of a method, each for a microsecond
  py::object keys;   ///< of a tensor, which no mode sees, but which takes longer than a method
  py::object key_of_neg;
  py::object key_of_conj;
  std::vector<py::object> types;                           ///< by DType: torch.dtype
  std::deque<std::pair<TensorSpec, py::tuple>> made_last;  ///< with the arguments of empty_strided

  Torch() {
    const py::module_ module = py::module_::import("torch");
    const py::object tensor = module.attr("Tensor");
    tensor_type = reinterpret_cast<PyTypeObject*>(tensor.ptr());
    if (py::hasattr(tensor, "__dlpack_c_exchange_api__")) {
      const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
      auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (api == nullptr) PyErr_Clear();
      while (api != nullptr && api->version.major > 1) api = api->previous;
      if (api != nullptr && api->version.major == 1 && api->info_from_object != nullptr) exchange = api;
    }
    const auto found = [](py::handle in, const char* name) { return py::getattr(in, name, py::handle()); };
    const py::object internals = module.attr("_C");
    from_capsule = found(internals, "_from_dlpack");
    raw_stream = found(internals, "_cuda_getCurrentRawStream");
    const py::object guards = py::getattr(py::getattr(internals, "_dynamo", py::none()), "guards", py::none());
    quick_empty_on_cpu = found(guards, "_empty_strided_cpu");
    quick_empty_on_gpu = found(guards, "_empty_strided_cuda");
    empty_strided = found(module, "empty_strided");
    as_strided = found(module, "as_strided");
    is_neg = found(tensor, "is_neg");
    is_conj = found(tensor, "is_conj");
    modes = found(internals, "_len_torch_function_stack");
    keys = found(internals, "_dispatch_keys");
    const py::object names = py::getattr(internals, "DispatchKey", py::none());
    key_of_neg = found(names, "Negative");
    key_of_conj = found(names, "Conjugate");
    for (const KnownType& type : kTypes) types.push_back(found(module, type.name));
  }
};

/// Found at the first call. Never destroyed: the objects live as long as the interpreter.
Torch& torch() {
  static auto* found = new Torch;
  return *found;
}

/// Its shape and its strides.
std::pair<py::tuple, py::tuple> tuples_of(const TensorSpec& spec) {
  const auto dims = static_cast<std::size_t>(spec.dims);
  std::pair<py::tuple, py::tuple> tuples{dims, dims};
  for (std::size_t dim = 0; dim < dims; ++dim) {
    tuples.first[dim] = spec.shape[dim];
    tuples.second[dim] = spec.strides[dim];
  }
  return tuples;
}

/// The result of a call of Python; else its exception goes on.
py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool same_layout(const TensorSpec& first, const TensorSpec& second) {
  return first.dims == second.dims && first.shape == second.shape && first.strides == second.strides;
}

/// The tensor of PyTorch behind a result, for as long as the library has it.
class FrameworkStorage final : public Tensor::Storage {
 public:
  explicit FrameworkStorage(TensorArgument made) : object_(keep(std::move(made.object))), made_(made.view) {}
  /// PyTorch is told of streams by its own users.
  void record_stream(StreamHandle) override {}
  /// The tensor as `view` has it. Needs the GIL.
  py::object object(const TensorSpec& view) const {
    if (view.elements() != 0 && same_layout(view, made_)) return py::reinterpret_borrow<py::object>(object_.get());
    const auto [shape, strides] = tuples_of(view);
    return torch().as_strided(py::handle(object_.get()), shape, strides);
  }

 private:
  KeptObject object_;
  TensorSpec made_;  ///< shape and strides of the object
};

/// Memory of the library in the hands of the framework, which gives it back through DLPack. It records the stream that
/// is current when it ends, on which a program often has used it. Works without the GIL.
struct HandedOut {
  dlpack::ManagedTensor managed;
  Tensor tensor;

  ~HandedOut() {
    const deep_ep::Device device = tensor.view().device;
    // Older versions cannot be asked without the GIL.
    if (device.kind != deep_ep::Device::Kind::cuda || torch().exchange == nullptr) return;
    try {
      void* stream = nullptr;
      if (torch().exchange->current_stream(dlpack::kCuda, device.index, &stream) != 0) return;
      if (!tensor.storage()->knows_stream(stream)) tensor.record_stream(stream);
    } catch (const std::exception&) {
      // At exit the driver may be gone; the memory goes with it.
    }
  }
};

/// Types that the library does not know have a code that says no more than that.
dlpack::DataType look_at_attributes(py::handle object, const char* name, TensorView& view) {
  const auto is = [&](const char* property) { return object.attr(property).cast<bool>(); };
  const bool gpu = is("is_cuda");
  if (!(gpu || is("is_cpu")) || is("is_sparse") || is("is_quantized")) refuse_storage(object, name);
  view.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<std::uintptr_t>());
  if (gpu) view.device = {deep_ep::Device::Kind::cuda, object.attr("get_device")().cast<int>()};
  const auto shape = py::reinterpret_borrow<py::tuple>(object.attr("shape"));
  const auto strides = py::tuple(object.attr("stride")());
  view.dims = static_cast<int>(shape.size());
  for (std::size_t dim = 0; dim < shape.size() && dim < kMaxDims; ++dim) {
    view.shape[dim] = shape[dim].cast<std::int64_t>();
    view.strides[dim] = strides[dim].cast<std::int64_t>();
  }
  const py::object dtype = object.attr("dtype");
  const auto known = std::ranges::find_if(torch().types, [&](const py::object& type) { return type.is(dtype); });
  if (known != torch().types.end()) return kTypes[static_cast<std::size_t>(known - torch().types.begin())].dtype;
  return {dlpack::kOpaque, static_cast<std::uint8_t>(8 * object.attr("element_size")().cast<int>()), 1};
}

/// Shape, strides and type. Calls ask for the same few over and over, and making the numbers of a tuple takes half as
/// long as a tensor. Tensors without elements get one, as PyTorch gives them no address.
py::tuple arguments_of_empty(const TensorSpec& wanted) {
  for (const auto& [spec, arguments] : torch().made_last) {
    if (spec.dtype == wanted.dtype && same_layout(spec, wanted)) return arguments;
  }
  constexpr std::size_t kMost = 8;
  if (torch().made_last.size() == kMost) torch().made_last.pop_front();
  const auto [shape, strides] = tuples_of(wanted.elements() == 0 ? TensorSpec::contiguous(wanted.dtype, {1}) : wanted);
  const py::object& type = torch().types[static_cast<std::size_t>(wanted.dtype)];
  return torch().made_last.emplace_back(wanted, py::make_tuple(shape, strides, type)).second;
}

/// A new tensor of the framework for the current stream.
TensorArgument empty(const TensorSpec& wanted) {
  const py::tuple arguments = arguments_of_empty(wanted);
  const py::handle quick =
      wanted.device.kind == deep_ep::Device::Kind::cuda ? torch().quick_empty_on_gpu : torch().quick_empty_on_cpu;
  if (torch().exchange != nullptr && quick) {
    TensorArgument made = borrow(checked(PyObject_CallObject(quick.ptr(), arguments.ptr())), "a result", true);
    // It is made for the current GPU, which the end of some other object may just have changed.
    if (made.view.device == wanted.device) return made;
  }
  return borrow(torch().empty_strided(arguments[0], arguments[1], py::arg("dtype") = arguments[2],
                                      py::arg("device") = to_string(wanted.device)),
                "a result", true);
}

/// A view by Tensor.imag or Tensor.conj, say, has other values than its memory holds.
void check_values(const TensorArgument& argument, const char* name) {
  const Torch& torch = bindings::torch();
  const auto call = [](const py::object& function, py::handle given) {
    return checked(PyObject_CallOneArg(function.ptr(), given.ptr()));
  };
  const bool alone = torch.modes && Py_TYPE(argument.object.ptr()) == torch.tensor_type &&
                     checked(PyObject_CallNoArgs(torch.modes.ptr())).equal(py::int_(0));
  const auto is = [&](const py::object& property, const py::object& key) {
    if (alone || !torch.keys || !key) return call(property, argument.object).is(py::handle(Py_True));
    return call(torch.keys, argument.object).attr("has")(key).cast<bool>();
  };
  const bool negative = is(torch.is_neg, torch.key_of_neg);
  if (!negative && !(argument.renamed && is(torch.is_conj, torch.key_of_conj))) return;
  throw InvalidArgument(fmt::format(
      "{} must be a tensor whose memory holds its values, got a view with the {} bit: pass its resolve_{}()", name,
      negative ? "negative" : "conjugate", negative ? "neg" : "conj"));
}

}  // namespace

TensorArgument borrow(py::handle object, const char* name, bool made_here) {
  if (!PyObject_TypeCheck(object.ptr(), torch().tensor_type)) {
    throw py::type_error(
        fmt::format("{} is of type {}, expected a torch.Tensor", name, Py_TYPE(object.ptr())->tp_name));
  }
  check_class(object, name);
  TensorArgument argument{.object = py::reinterpret_borrow<py::object>(object), .view = {}};
  TensorView& view = argument.view;
  dlpack::DataType dtype{};
  if (torch().exchange != nullptr) {
    dlpack::TensorInfo info{};
    if (torch().exchange->info_from_object(object.ptr(), &info) != 0) {
      PyErr_Clear();  // the framework's text is a dump of its C++ stack
      refuse_storage(object, name);
    }
    dtype = info.dtype;
    view.data = info.data == nullptr ? nullptr : static_cast<std::byte*>(info.data) + info.byte_offset;
    const bool gpu = info.device.type == dlpack::kCuda;
    if (!gpu && info.device.type != dlpack::kCpu && info.device.type != dlpack::kCudaHost) refuse_storage(object, name);
    if (gpu) view.device = {deep_ep::Device::Kind::cuda, info.device.index};
    view.dims = info.dims;
    const auto dims = static_cast<std::size_t>(std::min(info.dims, kMaxDims));
    std::copy_n(info.shape, dims, view.shape.begin());
    std::copy_n(info.strides, dims, view.strides.begin());
  } else {
    dtype = look_at_attributes(object, name, view);
  }
  if (view.dims > kMaxDims) {
    throw InvalidArgument(fmt::format("{} has {} dimensions, allowed: at most {}", name, view.dims, kMaxDims));
  }
  const auto* known = std::ranges::find(kTypes, dtype, &KnownType::dtype);
  argument.renamed = known == kTypes.end();
  // Dispatch moves bytes: the first type of that size does, but not bool.
  const auto has_size = [&](const KnownType& type) { return dtype.lanes == 1 && dtype.bits == type.dtype.bits; };
  if (argument.renamed) known = std::find_if(kTypes.begin() + 1, kTypes.end(), has_size);
  if (known == kTypes.end()) refuse_dtype(object, name, types_of(name, true));
  view.dtype = static_cast<DType>(known - kTypes.begin());
  if (made_here) return argument;
  if (view.data == nullptr && view.elements() != 0) refuse_without_memory(object, name);
  check_values(argument, name);
  return argument;
}

TensorView view_of(py::handle object, const char* name) {
  const TensorArgument argument = borrow(object, name);
  if (argument.renamed) refuse_dtype(object, name, types_of(name, false));
  return argument.view;
}

py::object hand_out(const Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  const auto* result = dynamic_cast<const FrameworkStorage*>(tensor.storage().get());
  if (result != nullptr) return result->object(tensor.view());
  std::unique_ptr<HandedOut> owner(new HandedOut{{}, tensor});
  const TensorView& view = owner->tensor.view();
  const bool gpu = view.device.kind == deep_ep::Device::Kind::cuda;
  const dlpack::Device device{gpu ? dlpack::kCuda : dlpack::kCpu, gpu ? view.device.index : 0};
  const auto give_back = [](dlpack::ManagedTensor* managed) { delete static_cast<HandedOut*>(managed->context); };
  owner->managed = {{view.data, device, view.dims, kTypes[static_cast<std::size_t>(view.dtype)].dtype,
                     view.shape.data(), view.strides.data(), 0},
                    owner.get(),
                    give_back};
  const py::capsule capsule(&owner->managed, "dltensor");
  py::object object = checked(PyObject_CallOneArg(torch().from_capsule.ptr(), capsule.ptr()));
  owner.release();  // NOLINT(bugprone-unused-return-value): from here on the framework has it, and its deleter ends it
  return object;
}

StreamHandle current_stream(const deep_ep::Device& device) {
  if (device.kind != deep_ep::Device::Kind::cuda) return nullptr;
  if (torch().exchange != nullptr) {
    void* stream = nullptr;
    if (torch().exchange->current_stream(dlpack::kCuda, device.index, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  return reinterpret_cast<void*>(torch().raw_stream(device.index).cast<std::uintptr_t>());
}

std::shared_ptr<Executor> gpu_executor(int device) {
  static auto* executors = new std::map<int, std::shared_ptr<Executor>>;
  std::shared_ptr<Executor>& executor = (*executors)[device];
  if (!executor) executor = make_cuda_executor(device);
  return executor;
}

Event Event::of_current_stream() {
  const py::module_ cuda = py::module_::import("torch.cuda");
  // Before CUDA starts there is no work on any stream; starting it here would cost memory on GPU 0.
  if (!cuda.attr("is_initialized")().cast<bool>()) return {};
  const int device = cuda.attr("current_device")().cast<int>();
  Executor* const gpu = gpu_executor(device).get();
  return {gpu, gpu->record_event(current_stream(gpu->device()))};
}

void Event::wait_on_current_stream() const {
  if (gpu == nullptr) return;
  const StreamHandle stream = current_stream(gpu->device());
  gpu->wait_event(stream, event);
  for (const auto& tensor : kept) {
    if (const auto storage = tensor.lock()) storage->record_stream(stream);
  }
}

namespace {

/// Segments that PyTorch asks for in this thread come from it.
thread_local std::shared_ptr<HeapPieces> current_heap;  // NOLINT: one thread, one call

/// Segments that are out, each with the heap that it is of, which lives as long.
struct SegmentsOut {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<HeapPieces>> heap_of;
};
SegmentsOut& segments_out() {
  static auto* out = new SegmentsOut;  // PyTorch frees after static objects have ended
  return *out;
}

py::list describe(std::span<const TensorView> wanted) {
  py::list list;
  for (const TensorView& view : wanted) list.append(arguments_of_empty(view));
  return list;
}

class FrameworkResults final : public ResultTensors {
 public:
  explicit FrameworkResults(py::object helper) : helper_(keep(std::move(helper))) {}

  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order& order,
                           const std::shared_ptr<HeapPieces>& heap) override {
    const py::gil_scoped_acquire gil;
    if (wanted.empty()) return {};
    const py::handle helper(helper_.get());
    // PyTorch's memory on the CPU knows no streams.
    const bool gpu = wanted[0].device.kind == Device::Kind::cuda, by_other = gpu && order.other;
    const bool on_other = gpu && current_stream(wanted[0].device) != order.stream;
    if (heap) {
      auto& [in_vain, segment] = questions_[order.stream];
      if (!std::has_single_bit(++in_vain) && in_vain % kMostSkipped != 0) return {};
      const SetWithin segments(current_heap, heap);
      const std::size_t more = segment_for(wanted, segment);
      const py::object tensors =
          helper.attr("make_in_heap")(describe(wanted), on_other, by_other, more <= heap->largest_free() ? more : 0);
      std::vector<Tensor> made = tensors.is_none() ? std::vector<Tensor>() : tensors_over(tensors, wanted);
      // PyTorch takes them from elsewhere where its allocator is set to do so, or where the program uses another pool.
      const auto inside = [&](const Tensor& tensor) { return heap->contains(tensor.data()); };
      if (!made.empty() && std::ranges::all_of(made, inside)) in_vain = 0;
      return made;
    }
    try {
      if (on_other || by_other) return tensors_over(helper.attr("make")(describe(wanted), on_other, by_other), wanted);
      std::vector<Tensor> made;
      made.reserve(wanted.size());
      for (const TensorView& view : wanted) made.push_back(tensor_over(empty(view), view));
      return made;
    } catch (const py::error_already_set& error) {
      if (!error.matches(py::module_::import("torch.cuda").attr("OutOfMemoryError"))) throw;
      const std::string text = error.what();  // with a dump of PyTorch's C++ stack
      throw OutOfMemory(
          fmt::format("PyTorch has no memory for the results of a call: {}", text.substr(0, text.find('\n'))));
    }
  }

 private:
  /// Bytes of a segment larger than the `largest` so far, 0 if that has room for `wanted`. Of PyTorch's allocator:
  /// blocks are multiples of 512 bytes, segments of 2 MiB, and those for large blocks have 16 MiB or more.
  static std::size_t segment_for(std::span<const TensorView> wanted, std::size_t& largest) {
    std::size_t bytes = 0;
    for (const TensorView& view : wanted) bytes += view.bytes() + 512;
    if (bytes <= largest) return 0;
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    return largest = std::max(2 * bytes, 16 * kMiB) / (2 * kMiB) * (2 * kMiB);
  }
  static Tensor tensor_over(TensorArgument made, TensorView view) {
    view.data = made.view.data;
    return {view, std::make_shared<FrameworkStorage>(std::move(made))};
  }
  /// Over those of the list `made`.
  static std::vector<Tensor> tensors_over(const py::object& made, std::span<const TensorView> wanted) {
    std::vector<Tensor> tensors;
    for (const py::handle each : made)
      tensors.push_back(tensor_over(borrow(each, "a result", true), wanted[tensors.size()]));
    return tensors;
  }

  KeptObject helper_;
  /// Before PyTorch says that the heap has no memory, it looks everywhere, which takes long, and tells its observers.
  /// So it is asked less and less often, of each stream by itself: PyTorch keeps the memory of one from the others.
  static constexpr unsigned kMostSkipped = 64;
  struct Questions {
    unsigned in_vain = 0;     ///< calls without such memory since the last one with it
    std::size_t segment = 0;  ///< bytes of the largest one that was asked for
  };
  std::unordered_map<StreamHandle, Questions> questions_;
};

}  // namespace

void LetGo::operator()(PyObject* object) const {
  if (Py_IsInitialized() == 0) return;  // at exit the interpreter has taken it
  const py::gil_scoped_acquire gil;
  auto ended = py::reinterpret_steal<py::object>(object);
  if (let_go_later != nullptr) let_go_later->push_back(std::move(ended));
}

std::shared_ptr<ResultTensors> make_framework_results(py::object helper) {
  return std::make_shared<FrameworkResults>(std::move(helper));
}

}  // namespace deep_ep::bindings

// The functions that torch.cuda.memory.CUDAPluggableAllocator looks up by name. nullptr: PyTorch has no such memory.

extern "C" __attribute__((visibility("default"))) void* deep_ep_allocate_segment(ssize_t bytes, int /*device*/,
                                                                                 void* stream) {
  using namespace deep_ep::bindings;
  if (current_heap == nullptr || bytes <= 0) return nullptr;
  try {
    void* const segment = current_heap->take(static_cast<std::size_t>(bytes), stream);
    SegmentsOut& out = segments_out();
    const std::lock_guard lock(out.mutex);
    if (segment != nullptr) out.heap_of.insert_or_assign(segment, current_heap);
    return segment;
  } catch (const std::exception&) {
    return nullptr;  // PyTorch says so to the call, which takes other memory
  }
}

extern "C" __attribute__((visibility("default"))) void deep_ep_free_segment(void* segment, ssize_t bytes,
                                                                            int /*device*/, void* stream) {
  using namespace deep_ep::bindings;
  const auto ended = [&, &out = segments_out()] {
    const std::lock_guard lock(out.mutex);
    return out.heap_of.extract(segment);
  }();
  if (ended) ended.mapped()->give_back(segment, static_cast<std::size_t>(bytes), stream);
}
