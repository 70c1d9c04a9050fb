#include "python/bindings/framework.hpp"

#include <fmt/format.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::bindings {
namespace {

constexpr int kMaxDims = TensorView::kMaxDims;

struct KnownType {
  const char* name;  ///< in torch
  dlpack::DataType dtype;
};
/// Those of DType first, in its order; the contents of the others travel as they are.
constexpr std::array<KnownType, 20> kTypes = {{
    {"bool", {dlpack::kBool, 8, 1}},
    {"uint8", {dlpack::kUInt, 8, 1}},
    {"int32", {dlpack::kInt, 32, 1}},
    {"int64", {dlpack::kInt, 64, 1}},
    {"float32", {dlpack::kFloat, 32, 1}},
    {"bfloat16", {dlpack::kBfloat, 16, 1}},
    {"float16", {dlpack::kFloat, 16, 1}},
    {"float8_e4m3fn", {dlpack::kFloat8E4m3fn, 8, 1}},
    {"float8_e5m2", {dlpack::kFloat8E5m2, 8, 1}},
    {"int8", {dlpack::kInt, 8, 1}},
    {"int16", {dlpack::kInt, 16, 1}},
    {"float64", {dlpack::kFloat, 64, 1}},
    {"complex64", {dlpack::kComplex, 64, 1}},
    {"uint16", {dlpack::kUInt, 16, 1}},
    {"uint32", {dlpack::kUInt, 32, 1}},
    {"uint64", {dlpack::kUInt, 64, 1}},
    {"float8_e4m3fnuz", {dlpack::kFloat8E4m3fnuz, 8, 1}},
    {"float8_e5m2fnuz", {dlpack::kFloat8E5m2fnuz, 8, 1}},
    {"float8_e8m0fnu", {dlpack::kFloat8E8m0fnu, 8, 1}},
    {"complex32", {dlpack::kComplex, 32, 1}},
}};
constexpr std::size_t kLibraryTypes = static_cast<std::size_t>(DType::float8_e5m2) + 1;

dlpack::DataType dlpack_type(DType dtype) { return kTypes.at(static_cast<std::size_t>(dtype)).dtype; }

std::optional<DType> library_type(const dlpack::DataType& dtype) {
  for (std::size_t number = 0; number < kLibraryTypes; ++number) {
    if (kTypes[number].dtype == dtype) return static_cast<DType>(number);
  }
  return std::nullopt;
}

/// For dispatch, rows are bytes.
std::optional<DType> type_of_size(const dlpack::DataType& dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  switch (dtype.bits) {
    case 8:
      return DType::uint8;
    case 16:
      return DType::float16;
    case 32:
      return DType::int32;
    case 64:
      return DType::int64;
    default:
      return std::nullopt;
  }
}

[[noreturn]] void refuse_dtype(py::handle object, const char* name) {
  const std::string dtype = py::str(object.attr("dtype"));
  throw InvalidArgument(fmt::format("{} has dtype {}, which does not fit here", name, dtype));
}

/// A tensor that has no memory to send from: on another kind of device, sparse, or only a shape ("meta").
[[noreturn]] void refuse_storage(py::handle object, const char* name) {
  const std::string device = py::str(object.attr("device"));
  const std::string layout = py::str(object.attr("layout"));
  if (object.attr("is_cuda").cast<bool>() || object.attr("is_cpu").cast<bool>()) {
    if (layout == "torch.strided") refuse_dtype(object, name);  // bits, quantized: DLPack has no word for them
    throw InvalidArgument(fmt::format("{} has layout {}, allowed: torch.strided", name, layout));
  }
  throw InvalidArgument(fmt::format("{} lies on a device that is neither CPU nor CUDA: {}", name, device));
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

/// Tensors without elements get one, as PyTorch gives them no address.
TensorSpec with_memory(const TensorSpec& wanted) {
  return wanted.elements() == 0 ? TensorSpec::contiguous(wanted.dtype, {1}, wanted.device) : wanted;
}

/// A reference that is never given back.
PyObject* kept(const py::object& object) { return py::object(object).release().ptr(); }

/// nullptr: the framework cannot be asked without the GIL.
using CurrentStream = int (*)(dlpack::DeviceType, std::int32_t, void**);

/// The stream on which a program drops a tensor is often one that used it.
void record_current_stream(const Tensor& tensor, CurrentStream current_stream) noexcept {
  const deep_ep::Device device = tensor.view().device;
  if (device.kind != deep_ep::Device::Kind::cuda || current_stream == nullptr) return;
  try {
    void* stream = nullptr;
    if (current_stream(dlpack::kCuda, device.index, &stream) != 0 || tensor.storage()->knows_stream(stream)) return;
    if (!gpu_executor(device.index)->is_capturing(stream)) tensor.record_stream(stream);
  } catch (const std::exception&) {
    // At exit the driver may be gone; the memory goes with it.
  }
}

/// Memory of the library in the hands of the framework, which gives it back through DLPack. Its context is itself;
/// `give_back` ends it.
struct HandedOut {
  HandedOut(const Tensor& given, CurrentStream stream)
      : tensor(given), shape(given.view().shape), strides(given.view().strides), current_stream(stream) {
    versioned.version = {1, 0};
    versioned.context = plain.context = this;
    versioned.deleter = [](dlpack::ManagedTensorVersioned* self) { give_back(static_cast<HandedOut*>(self->context)); };
    plain.deleter = [](dlpack::ManagedTensor* self) { give_back(static_cast<HandedOut*>(self->context)); };
  }
  HandedOut(const HandedOut&) = delete;
  HandedOut& operator=(const HandedOut&) = delete;

  void fill(dlpack::TensorInfo& info, const dlpack::DataType& dtype) {
    const TensorView& view = tensor.view();
    const bool gpu = view.device.kind == deep_ep::Device::Kind::cuda;
    info = {view.data,
            {gpu ? dlpack::kCuda : dlpack::kCpu, gpu ? view.device.index : 0},
            view.dims,
            dtype,
            shape.data(),
            strides.data(),
            0};
  }
  static void give_back(HandedOut* handed_out) noexcept {
    const std::unique_ptr<HandedOut> owner(handed_out);
    record_current_stream(owner->tensor, owner->current_stream);
  }

  dlpack::ManagedTensorVersioned versioned{};
  dlpack::ManagedTensor plain{};
  Tensor tensor;
  std::array<std::int64_t, TensorView::kMaxDims> shape;
  std::array<std::int64_t, TensorView::kMaxDims> strides;
  CurrentStream current_stream;
};

/// Asks for bytes: several tensors of a call share them.
class FrameworkAllocator final : public ResultAllocator {
 public:
  explicit FrameworkAllocator(const dlpack::ExchangeApi& api) : api_(api) {}

  Memory allocate(std::size_t bytes, const deep_ep::Device& device, StreamHandle /*the current one*/) override {
    std::int64_t shape = static_cast<std::int64_t>(bytes);
    dlpack::TensorInfo wanted{nullptr, {dlpack::kCuda, device.index}, 1, {dlpack::kUInt, 8, 1}, &shape, nullptr, 0};
    dlpack::ManagedTensorVersioned* made = nullptr;
    std::string error;
    const auto tell = [](void* text, const char*, const char* message) { *static_cast<std::string*>(text) = message; };
    if (api_.allocate(&wanted, &made, &error, tell) != 0 || made == nullptr) {
      throw OutOfMemory(fmt::format("the framework has no {} bytes for the results of a call: {}", bytes, error));
    }
    return {static_cast<std::byte*>(made->tensor.data) + made->tensor.byte_offset,
            std::shared_ptr<void>(made, [](void* memory) {
              auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(memory);
              managed->deleter(managed);
            })};
  }

 private:
  const dlpack::ExchangeApi& api_;
};

}  // namespace

std::shared_ptr<ResultAllocator> Framework::allocator() const {
  if (exchange_ == nullptr || exchange_->allocate == nullptr) return nullptr;
  return std::make_shared<FrameworkAllocator>(*exchange_);
}

Framework& Framework::instance() {
  static auto* framework = new Framework;
  return *framework;
}

Framework::Framework() {
  const py::module_ torch = py::module_::import("torch");
  const py::object tensor = torch.attr("Tensor");
  tensor_type_ = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  if (py::hasattr(tensor, "__dlpack_c_exchange_api__")) {
    const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) PyErr_Clear();
    while (api != nullptr && api->version.major > 1) api = api->previous;
    if (api != nullptr && api->version.major == 1 && api->info_from_object != nullptr) available_exchange_ = api;
  }
  exchange_ = available_exchange_;
  is_neg_ = PyUnicode_InternFromString("is_neg");
  is_conj_ = PyUnicode_InternFromString("is_conj");
  if (is_neg_ == nullptr || is_conj_ == nullptr) throw py::error_already_set();

  const py::object internals = torch.attr("_C");
  from_capsule_ = kept(internals.attr("_from_dlpack"));
  if (py::hasattr(internals, "_cuda_getCurrentRawStream")) {
    raw_stream_ = kept(internals.attr("_cuda_getCurrentRawStream"));
  }
  empty_strided_ = kept(torch.attr("empty_strided"));
  if (py::hasattr(internals, "_dynamo") && py::hasattr(internals.attr("_dynamo"), "guards")) {
    const py::object quick = internals.attr("_dynamo").attr("guards");
    const auto find = [&](const char* name) { return py::hasattr(quick, name) ? kept(quick.attr(name)) : nullptr; };
    quick_empty_on_cpu_ = find("_empty_strided_cpu");
    quick_empty_on_gpu_ = find("_empty_strided_cuda");
  }
  as_strided_ = kept(torch.attr("as_strided"));
  out_of_memory_ = kept(torch.attr("cuda").attr("OutOfMemoryError"));
  for (const auto& [name, dtype] : kTypes) {
    if (py::hasattr(torch, name)) types_.push_back({kept(torch.attr(name)), dtype});
  }
}

bool Framework::use_exchange_api(bool use) {
  const bool before = exchange_ != nullptr;
  exchange_ = use ? available_exchange_ : nullptr;
  return before;
}

TensorArgument Framework::borrow(py::handle object, const char* name, Accept accept) const {
  if (!PyObject_TypeCheck(object.ptr(), tensor_type_)) {
    throw py::type_error(
        fmt::format("{} is of type {}, expected a torch.Tensor", name, Py_TYPE(object.ptr())->tp_name));
  }
  TensorArgument argument;
  if (exchange_ != nullptr) {
    dlpack::TensorInfo info{};
    if (exchange_->info_from_object(object.ptr(), &info) != 0) {
      PyErr_Clear();  // the framework's text is a dump of its C++ stack
      refuse_storage(object, name);
    }
    argument.dtype = info.dtype;
    TensorView& view = argument.view;
    view.data = static_cast<std::byte*>(info.data) + info.byte_offset;
    if (info.data == nullptr) view.data = nullptr;
    const bool gpu = info.device.type == dlpack::kCuda;
    if (!gpu && info.device.type != dlpack::kCpu && info.device.type != dlpack::kCudaHost) {
      refuse_storage(object, name);
    }
    view.device = {gpu ? deep_ep::Device::Kind::cuda : deep_ep::Device::Kind::cpu, gpu ? info.device.index : 0};
    view.dims = info.dims;
    for (int dim = 0; dim < info.dims && dim < kMaxDims; ++dim) {
      view.shape[static_cast<std::size_t>(dim)] = info.shape[dim];
      view.strides[static_cast<std::size_t>(dim)] = info.strides[dim];
    }
  } else {
    argument = borrow_by_attributes(object, name);
  }
  if (argument.view.dims > kMaxDims) {
    throw InvalidArgument(fmt::format("{} has {} dimensions, allowed: at most {}", name, argument.view.dims, kMaxDims));
  }
  std::optional<DType> dtype = library_type(argument.dtype);
  if (!dtype && accept == Accept::any_type) dtype = type_of_size(argument.dtype);
  if (!dtype) refuse_dtype(object, name);
  argument.view.dtype = *dtype;
  argument.object = object;
  refuse_lazy(argument, name);
  return argument;
}

void Framework::refuse_lazy(const TensorArgument& argument, const char* name) const {
  const std::uint8_t code = argument.dtype.code;
  // Complex tensors and their parts are the only ones, and the question is a call of Python for each tensor.
  if (code != dlpack::kFloat && code != dlpack::kComplex) return;
  const auto has = [&](PyObject* question) {
    const auto answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(argument.object.ptr(), question));
    if (!answer) throw py::error_already_set();
    return answer.ptr() == Py_True;
  };
  if (has(is_neg_)) {
    throw InvalidArgument(fmt::format(
        "{0} is a view whose values are the negatives of what lies in memory, allowed: {0}.resolve_neg()", name));
  }
  if (code == dlpack::kComplex && has(is_conj_)) {
    throw InvalidArgument(fmt::format(
        "{0} is a view whose values are the conjugates of what lies in memory, allowed: {0}.resolve_conj()", name));
  }
}

TensorArgument Framework::borrow_by_attributes(py::handle object, const char* name) const {
  TensorArgument argument;
  TensorView& view = argument.view;
  argument.dtype = dtype_of(object, name);
  const bool gpu_or_cpu = object.attr("is_cuda").cast<bool>() || object.attr("is_cpu").cast<bool>();
  if (!gpu_or_cpu || object.attr("is_sparse").cast<bool>()) refuse_storage(object, name);
  view.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<std::uintptr_t>());
  if (object.attr("is_cuda").cast<bool>()) {
    view.device = {deep_ep::Device::Kind::cuda, object.attr("get_device")().cast<int>()};
  }
  const auto shape = py::reinterpret_borrow<py::tuple>(object.attr("shape"));
  const auto strides = py::tuple(object.attr("stride")());
  view.dims = static_cast<int>(shape.size());
  for (std::size_t dim = 0; dim < shape.size() && dim < kMaxDims; ++dim) {
    view.shape[dim] = shape[dim].cast<std::int64_t>();
    view.strides[dim] = strides[dim].cast<std::int64_t>();
  }
  return argument;
}

dlpack::DataType Framework::dtype_of(py::handle object, const char* name) const {
  const py::object dtype = object.attr("dtype");
  for (const NamedType& type : types_) {
    if (type.object == dtype.ptr()) return type.dtype;
  }
  refuse_dtype(object, name);
}

py::handle Framework::named(const dlpack::DataType& dtype) const {
  for (const NamedType& type : types_) {
    if (type.dtype == dtype) return type.object;
  }
  return {};
}

py::object Framework::dtype_object(DType dtype) const {
  const py::handle object = named(dlpack_type(dtype));
  if (!object) throw Error(fmt::format("this version of PyTorch has no type {}", name_of(dtype)));
  return py::reinterpret_borrow<py::object>(object);
}

Framework::Made Framework::empty(const TensorSpec& wanted) const {
  const TensorSpec spec = with_memory(wanted);
  const auto [shape, strides] = tuples_of(spec);
  const bool gpu = wanted.device.kind == deep_ep::Device::Kind::cuda;
  const py::object type = dtype_object(wanted.dtype);
  PyObject* const quick = gpu ? quick_empty_on_gpu_ : quick_empty_on_cpu_;
  if (exchange_ != nullptr && quick != nullptr) {
    auto made = py::reinterpret_steal<py::object>(
        PyObject_CallFunctionObjArgs(quick, shape.ptr(), strides.ptr(), type.ptr(), nullptr));
    if (!made) throw py::error_already_set();
    // It is made for the current GPU, which the end of some other object may just have changed.
    dlpack::TensorInfo info{};
    if (exchange_->info_from_object(made.ptr(), &info) != 0) throw py::error_already_set();
    if (!gpu || info.device.index == wanted.device.index) {
      return {std::move(made), {spec, static_cast<std::byte*>(info.data) + info.byte_offset}};
    }
  }
  py::object object =
      py::handle(empty_strided_)(shape, strides, py::arg("dtype") = type, py::arg("device") = to_string(wanted.device));
  const TensorView view = borrow(object, "a result").view;
  return {std::move(object), view};
}

py::object Framework::hand_out(const Tensor& tensor, const dlpack::DataType* as) const {
  if (!tensor.defined()) return py::none();
  const TensorView& view = tensor.view();
  const dlpack::DataType dtype = as != nullptr ? *as : dlpack_type(view.dtype);
  const auto* result = dynamic_cast<const FrameworkStorage*>(tensor.storage().get());
  if (result == nullptr) return shared(tensor, dtype);
  py::object object = result->object();
  if (!result->looks_like(view)) {
    const auto [shape, strides] = tuples_of(view);
    object = py::handle(as_strided_)(object, shape, strides);
  }
  // Types that the library does not know travel as types of their size.
  if (dtype != dlpack_type(view.dtype)) object = object.attr("view")(named(dtype));
  return object;
}

py::object Framework::shared(const Tensor& tensor, const dlpack::DataType& dtype) const {
  auto owner = std::make_unique<HandedOut>(tensor, exchange_ != nullptr ? exchange_->current_stream : nullptr);
  HandedOut& handed_out = *owner;
  if (exchange_ != nullptr) {
    handed_out.fill(handed_out.versioned.tensor, dtype);
    void* object = nullptr;
    // The framework takes it over only when this succeeds.
    if (exchange_->managed_to_object(&handed_out.versioned, &object) != 0) throw py::error_already_set();
    owner.release();  // NOLINT(bugprone-unused-return-value): its deleter ends it
    return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
  }

  // Older versions do not know 8-bit floating point in DLPack: it leaves as bytes and is renamed.
  const bool renamed = dtype.bits == 8 && dtype.code != dlpack::kBool;
  handed_out.fill(handed_out.plain.tensor, renamed ? dlpack::DataType{dlpack::kUInt, 8, 1} : dtype);
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(&handed_out.plain, "dltensor", nullptr));
  if (!capsule) throw py::error_already_set();
  py::object object = py::reinterpret_borrow<py::object>(from_capsule_)(capsule);
  owner.release();  // NOLINT(bugprone-unused-return-value): its deleter ends it
  if (const py::handle type = named(dtype); renamed && type) return object.attr("view")(type);
  return object;
}

py::object Framework::hand_out(const std::optional<Tensor>& tensor) const {
  return tensor ? hand_out(*tensor) : py::object(py::none());
}

StreamHandle Framework::current_stream(const deep_ep::Device& device) const {
  if (device.kind != deep_ep::Device::Kind::cuda) return nullptr;
  if (exchange_ != nullptr) {
    void* stream = nullptr;
    if (exchange_->current_stream(dlpack::kCuda, device.index, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  if (raw_stream_ == nullptr) throw InvalidArgument("a CUDA tensor, but this PyTorch was built without CUDA");
  return reinterpret_cast<void*>(py::handle(raw_stream_)(device.index).cast<std::uintptr_t>());
}

// Events.

std::shared_ptr<Executor> gpu_executor(int device) {
  static auto* mutex = new std::mutex;
  static auto* executors = new std::map<int, std::shared_ptr<Executor>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<Executor>& executor = (*executors)[device];
  if (!executor) executor = make_cuda_executor(device);
  return executor;
}

Event Event::of_current_stream() {
  Event event;
  const py::module_ cuda = py::module_::import("torch.cuda");
  // Before CUDA starts there is no work on any stream; starting it here would cost memory on GPU 0.
  if (!cuda.attr("is_initialized")().cast<bool>()) return event;
  const int device = cuda.attr("current_device")().cast<int>();
  event.executor_ = gpu_executor(device);
  event.event_ = event.executor_->record_event(Framework::instance().current_stream({Device::Kind::cuda, device}));
  return event;
}

void Event::wait_on_current_stream() const {
  if (!executor_ || executor_->device().kind == Device::Kind::cpu) return;
  const StreamHandle stream = Framework::instance().current_stream(executor_->device());
  executor_->wait_event(stream, event_);
  for (const auto& kept : kept_) {
    if (const auto storage = kept.lock()) storage->record_stream(stream);
  }
}

// Results.

namespace {

thread_local std::shared_ptr<HeapPieces> current_heap;  // NOLINT: one thread, one call

/// Segments that are out, each with the heap that it is of, which lives as long.
struct SegmentsOut {
  static SegmentsOut& instance() {
    static auto* out = new SegmentsOut;  // PyTorch frees after static objects have ended
    return *out;
  }
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<HeapPieces>> heap_of;
};

/// While it lives, segments that PyTorch asks for in this thread come from `heap`.
class SegmentsFrom {
 public:
  explicit SegmentsFrom(const std::shared_ptr<HeapPieces>& heap) : before_(std::exchange(current_heap, heap)) {}
  ~SegmentsFrom() { current_heap = std::move(before_); }
  SegmentsFrom(const SegmentsFrom&) = delete;
  SegmentsFrom& operator=(const SegmentsFrom&) = delete;

 private:
  std::shared_ptr<HeapPieces> before_;
};

py::list describe(std::span<const TensorView> wanted) {
  py::list list;
  for (const TensorView& view : wanted) {
    list.append(py::make_tuple(tuples_of(with_memory(view)).first, Framework::instance().dtype_object(view.dtype)));
  }
  return list;
}

/// PyTorch's text without the dump of its C++ stack.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void let_go(PyObject* object) {
  if (Py_IsInitialized() == 0) return;  // at exit the interpreter has taken it
  const py::gil_scoped_acquire gil;
  Py_DECREF(object);
}

void Leftovers::add(const std::shared_ptr<Leftovers>& leftovers, PyObject* object) {
  if (leftovers == nullptr) return let_go(object);
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (Py_REFCNT(object) > 1) {
    Py_DECREF(object);
    return;
  }
  const std::lock_guard lock(leftovers->mutex_);
  leftovers->objects_.push_back(object);
}

void Leftovers::clear() {
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(mutex_);
    objects = std::exchange(objects_, {});
  }
  for (PyObject* object : objects) let_go(object);
}

Tensor FrameworkResults::tensor_over(Framework::Made made, TensorView view) const {
  view.data = made.view.data;
  return {view, std::make_shared<FrameworkStorage>(std::move(made.object), made.view, leftovers_)};
}

Tensor FrameworkResults::tensor_over(py::object object, const TensorView& view) const {
  const TensorView made = Framework::instance().borrow(object, "a result").view;
  return tensor_over({std::move(object), made}, view);
}

std::vector<Tensor> FrameworkResults::make(std::span<const TensorView> wanted, const Order& order) {
  const py::gil_scoped_acquire gil;
  const Framework& framework = Framework::instance();
  std::vector<Tensor> made;
  made.reserve(wanted.size());
  if (wanted.empty()) return made;
  try {
    // PyTorch's memory on the CPU knows no streams.
    const bool cpu = wanted[0].device.kind == Device::Kind::cpu;
    const bool on_current = cpu || framework.current_stream(wanted[0].device) == order.stream;
    if (cpu || (on_current && !order.other)) {
      for (const TensorView& view : wanted) made.push_back(tensor_over(framework.empty(view), view));
      return made;
    }
    const py::list tensors = py::handle(helper_).attr("make")(describe(wanted), !on_current, order.other.has_value());
    for (std::size_t i = 0; i < wanted.size(); ++i) made.push_back(tensor_over(tensors[i], wanted[i]));
    return made;
  } catch (const py::error_already_set& error) {
    if (!error.matches(framework.out_of_memory())) throw;
    throw OutOfMemory(fmt::format("PyTorch has no memory for the results of a call: {}", first_line(error.what())));
  }
}

std::vector<Tensor> FrameworkResults::make_in_heap(std::span<const TensorView> wanted, const Order& order,
                                                   const std::shared_ptr<HeapPieces>& heap) {
  const py::gil_scoped_acquire gil;
  std::vector<Tensor> made;
  const py::handle helper(helper_);
  if (wanted.empty() || !helper.attr("in_heap").cast<bool>()) return made;
  const bool on_current = Framework::instance().current_stream(wanted[0].device) == order.stream;
  const bool cpu = wanted[0].device.kind == Device::Kind::cpu;  // only tests make such
  const SegmentsFrom segments(heap);
  const py::object tensors =
      helper.attr("make_in_heap")(describe(wanted), reinterpret_cast<std::uintptr_t>(order.stream), !on_current && !cpu,
                                  order.other.has_value() && !cpu, heap->largest_free());
  if (tensors.is_none()) return made;
  const auto list = py::reinterpret_borrow<py::list>(tensors);
  bool outside = false;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    made.push_back(tensor_over(list[i], wanted[i]));
    outside = outside || !heap->contains(made.back().data());
  }
  // PyTorch has taken it from elsewhere, as some settings of its allocator make it do.
  helper.attr(outside ? "is_elsewhere" : "is_in_heap")();
  return made;
}

}  // namespace deep_ep::bindings

// The functions that torch.cuda.memory.CUDAPluggableAllocator looks up by name. nullptr: PyTorch has no such memory.

extern "C" __attribute__((visibility("default"))) void* deep_ep_allocate_segment(ssize_t bytes, int /*device*/,
                                                                                 void* stream) {
  using namespace deep_ep::bindings;
  if (current_heap == nullptr || bytes <= 0) return nullptr;
  try {
    void* const segment = current_heap->take(static_cast<std::size_t>(bytes), stream);
    if (segment == nullptr) return nullptr;
    SegmentsOut& out = SegmentsOut::instance();
    const std::lock_guard lock(out.mutex);
    out.heap_of.insert_or_assign(segment, current_heap);
    return segment;
  } catch (const std::exception&) {
    return nullptr;  // PyTorch says so to the call, which takes other memory
  }
}

extern "C" __attribute__((visibility("default"))) void deep_ep_free_segment(void* segment, ssize_t /*bytes*/,
                                                                            int /*device*/, void* stream) {
  using namespace deep_ep::bindings;
  std::shared_ptr<deep_ep::HeapPieces> heap;
  {
    SegmentsOut& out = SegmentsOut::instance();
    const std::lock_guard lock(out.mutex);
    const auto found = out.heap_of.find(segment);
    if (found == out.heap_of.end()) return;
    heap = std::move(found->second);
    out.heap_of.erase(found);
  }
  heap->give_back(segment, stream);
}
