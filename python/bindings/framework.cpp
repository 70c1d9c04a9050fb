#include "python/bindings/framework.hpp"

#include <fmt/format.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <cstdint>
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

std::optional<DType> library_type(const dlpack::DataType& dtype) {
  const auto* found = std::ranges::find(kTypes, dtype, &KnownType::dtype);
  if (found == kTypes.end()) return std::nullopt;
  return static_cast<DType>(found - kTypes.begin());
}

/// For dispatch, rows are bytes.
std::optional<DType> type_of_size(const dlpack::DataType& dtype) {
  for (const DType same : {DType::uint8, DType::float16, DType::int32, DType::int64}) {
    if (dtype.lanes == 1 && dtype.bits == 8 * size_of(same)) return same;
  }
  return std::nullopt;
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

template <class... Arguments>
py::object call(py::handle function, const Arguments&... arguments) {
  auto result =
      py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(function.ptr(), arguments.ptr()..., nullptr));
  if (!result) throw py::error_already_set();
  return result;
}

/// Memory of the library in the hands of the framework, which gives it back through DLPack.
struct HandedOut {
  dlpack::ManagedTensor managed;
  Tensor tensor;
};

bool same_layout(const TensorSpec& first, const TensorSpec& second) {
  return first.dims == second.dims && first.shape == second.shape && first.strides == second.strides;
}

/// The tensor of PyTorch behind a result, for as long as the library has it.
class FrameworkStorage final : public Tensor::Storage {
 public:
  explicit FrameworkStorage(TensorArgument made) : object_(made.object.release().ptr()), made_(made.view) {}
  ~FrameworkStorage() override { let_go(object_); }
  FrameworkStorage(const FrameworkStorage&) = delete;
  FrameworkStorage& operator=(const FrameworkStorage&) = delete;
  /// PyTorch is told of streams by its own users.
  void record_stream(StreamHandle) override {}
  /// The tensor as `view` has it. Needs the GIL.
  py::object object(const TensorSpec& view, py::handle as_strided) const {
    if (view.elements() != 0 && same_layout(view, made_)) return py::reinterpret_borrow<py::object>(object_);
    const auto [shape, strides] = tuples_of(view);
    return call(as_strided, py::handle(object_), shape, strides);
  }

 private:
  PyObject* object_;
  TensorSpec made_;  ///< shape and strides of the object
};

}  // namespace

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
  const auto found = [](py::handle in, const char* name) { return py::getattr(in, name, py::handle()); };
  const py::object internals = torch.attr("_C");
  from_capsule_ = found(internals, "_from_dlpack");
  raw_stream_ = found(internals, "_cuda_getCurrentRawStream");
  const py::object guards = py::getattr(py::getattr(internals, "_dynamo", py::none()), "guards", py::none());
  quick_empty_on_cpu_ = found(guards, "_empty_strided_cpu");
  quick_empty_on_gpu_ = found(guards, "_empty_strided_cuda");
  empty_strided_ = found(torch, "empty_strided");
  as_strided_ = found(torch, "as_strided");
  out_of_memory_ = found(torch.attr("cuda"), "OutOfMemoryError");
  for (const KnownType& type : kTypes) types_.push_back(found(torch, type.name));
}

bool Framework::use_exchange_api(bool use) {
  const bool before = exchange_ != nullptr;
  exchange_ = use ? available_exchange_ : nullptr;
  return before;
}

TensorArgument Framework::look(py::handle object, const char* name, Accept accept) const {
  if (!PyObject_TypeCheck(object.ptr(), tensor_type_)) {
    throw py::type_error(
        fmt::format("{} is of type {}, expected a torch.Tensor", name, Py_TYPE(object.ptr())->tp_name));
  }
  TensorArgument argument{.object = py::reinterpret_borrow<py::object>(object), .view = {}};
  TensorView& view = argument.view;
  dlpack::DataType dtype{};
  if (exchange_ != nullptr) {
    dlpack::TensorInfo info{};
    if (exchange_->info_from_object(object.ptr(), &info) != 0) {
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
  std::optional<DType> known = library_type(dtype);
  if (!known && accept == Accept::any_type) {
    known = type_of_size(dtype);
    argument.renamed = true;
  }
  if (!known) refuse_dtype(object, name);
  view.dtype = *known;
  return argument;
}

TensorArgument Framework::borrow(py::handle object, const char* name, Accept accept) const {
  TensorArgument argument = look(object, name, accept);
  // Complex tensors and their parts are the only ones, and parts have gaps. The question is a call of Python, which
  // takes as long as all the rest where a mode is on, as torch.set_default_device sets one.
  const bool real = argument.view.dtype == DType::float32 || argument.view.dtype == DType::float16;
  const bool part = real && (argument.view.elements() == 1 || !argument.view.is_contiguous());
  if (!argument.renamed && !part) return argument;
  if (object.attr("is_neg")().cast<bool>()) {
    throw InvalidArgument(fmt::format(
        "{0} is a view whose values are the negatives of what lies in memory, allowed: {0}.resolve_neg()", name));
  }
  if (argument.renamed && object.attr("is_conj")().cast<bool>()) {
    throw InvalidArgument(fmt::format(
        "{0} is a view whose values are the conjugates of what lies in memory, allowed: {0}.resolve_conj()", name));
  }
  return argument;
}

/// Types that the library does not know have a code that says no more than that.
dlpack::DataType Framework::look_at_attributes(py::handle object, const char* name, TensorView& view) const {
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
  const auto known = std::ranges::find_if(types_, [&](const py::object& type) { return type.is(dtype); });
  if (known != types_.end()) return kTypes[static_cast<std::size_t>(known - types_.begin())].dtype;
  return {dlpack::kOpaque, static_cast<std::uint8_t>(8 * object.attr("element_size")().cast<int>()), 1};
}

/// Calls ask for the same few shapes over and over, and making the numbers of a tuple takes half as long as a tensor.
std::pair<py::tuple, py::tuple> Framework::known_tuples(const TensorSpec& spec) const {
  for (const auto& [known, tuples] : known_) {
    if (same_layout(known, spec)) return tuples;
  }
  constexpr std::size_t kMost = 8;
  if (known_.size() == kMost) known_.pop_front();
  return known_.emplace_back(spec, tuples_of(spec)).second;
}

TensorArgument Framework::empty(const TensorSpec& wanted) const {
  const auto [shape, strides] = known_tuples(with_memory(wanted));
  const py::handle type = dtype_object(wanted.dtype);
  const py::handle quick =
      wanted.device.kind == deep_ep::Device::Kind::cuda ? quick_empty_on_gpu_ : quick_empty_on_cpu_;
  if (exchange_ != nullptr && quick) {
    TensorArgument made = look(call(quick, shape, strides, type), "a result");
    // It is made for the current GPU, which the end of some other object may just have changed.
    if (made.view.device == wanted.device) return made;
  }
  return look(empty_strided_(shape, strides, py::arg("dtype") = type, py::arg("device") = to_string(wanted.device)),
              "a result");
}

py::object Framework::hand_out(const Tensor& tensor) const {
  if (!tensor.defined()) return py::none();
  const auto* result = dynamic_cast<const FrameworkStorage*>(tensor.storage().get());
  if (result != nullptr) return result->object(tensor.view(), as_strided_);
  auto owner = std::make_unique<HandedOut>(HandedOut{{}, tensor});
  const TensorView& view = owner->tensor.view();
  const bool gpu = view.device.kind == deep_ep::Device::Kind::cuda;
  const dlpack::Device device{gpu ? dlpack::kCuda : dlpack::kCpu, gpu ? view.device.index : 0};
  const auto give_back = [](dlpack::ManagedTensor* managed) {
    const std::unique_ptr<HandedOut> ended(static_cast<HandedOut*>(managed->context));
    instance().record_current_stream(ended->tensor);
  };
  owner->managed = {{view.data, device, view.dims, kTypes[static_cast<std::size_t>(view.dtype)].dtype,
                     view.shape.data(), view.strides.data(), 0},
                    owner.get(),
                    give_back};
  py::object object = call(from_capsule_, py::capsule(&owner->managed, "dltensor"));
  owner.release();  // NOLINT(bugprone-unused-return-value): from here on the framework has it, and its deleter ends it
  return object;
}

void Framework::record_current_stream(const Tensor& tensor) const noexcept {
  const deep_ep::Device device = tensor.view().device;
  // Older versions cannot be asked without the GIL.
  if (device.kind != deep_ep::Device::Kind::cuda || available_exchange_ == nullptr) return;
  try {
    void* stream = nullptr;
    if (available_exchange_->current_stream(dlpack::kCuda, device.index, &stream) != 0) return;
    if (!tensor.storage()->knows_stream(stream)) tensor.record_stream(stream);
  } catch (const std::exception&) {
    // At exit the driver may be gone; the memory goes with it.
  }
}

StreamHandle Framework::current_stream(const deep_ep::Device& device) const {
  if (device.kind != deep_ep::Device::Kind::cuda) return nullptr;
  if (exchange_ != nullptr) {
    void* stream = nullptr;
    if (exchange_->current_stream(dlpack::kCuda, device.index, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  if (!raw_stream_) throw InvalidArgument("a CUDA tensor, but this PyTorch was built without CUDA");
  return reinterpret_cast<void*>(raw_stream_(device.index).cast<std::uintptr_t>());
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
  for (const TensorView& view : wanted) {
    list.append(py::make_tuple(tuples_of(with_memory(view)).first, Framework::instance().dtype_object(view.dtype)));
  }
  return list;
}

class FrameworkResults final : public ResultTensors {
 public:
  explicit FrameworkResults(py::object helper) : helper_(keep(std::move(helper))) {}

  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order& order) override {
    const py::gil_scoped_acquire gil;
    if (wanted.empty()) return {};
    const Framework& framework = Framework::instance();
    // PyTorch's memory on the CPU knows no streams.
    const bool cpu = wanted[0].device.kind == Device::Kind::cpu;
    const bool on_current = cpu || framework.current_stream(wanted[0].device) == order.stream;
    try {
      if (!cpu && (!on_current || order.other)) {
        return tensors_over(
            py::handle(helper_.get()).attr("make")(describe(wanted), !on_current, order.other.has_value()), wanted);
      }
      std::vector<Tensor> made;
      made.reserve(wanted.size());
      for (const TensorView& view : wanted) made.push_back(tensor_over(framework.empty(view), view));
      return made;
    } catch (const py::error_already_set& error) {
      if (!error.matches(framework.out_of_memory())) throw;
      const std::string text = error.what();  // with a dump of PyTorch's C++ stack
      throw OutOfMemory(
          fmt::format("PyTorch has no memory for the results of a call: {}", text.substr(0, text.find('\n'))));
    }
  }

  std::vector<Tensor> make_in_heap(std::span<const TensorView> wanted, const Order& order,
                                   const std::shared_ptr<HeapPieces>& heap) override {
    const py::gil_scoped_acquire gil;
    const py::handle helper(helper_.get());
    if (wanted.empty() || !helper.attr("in_heap").cast<bool>()) return {};
    const bool gpu = wanted[0].device.kind == Device::Kind::cuda;  // only tests make others
    const bool on_other = gpu && Framework::instance().current_stream(wanted[0].device) != order.stream;
    const SetWithin segments(current_heap, heap);
    const py::object tensors =
        helper.attr("make_in_heap")(describe(wanted), reinterpret_cast<std::uintptr_t>(order.stream), on_other,
                                    gpu && order.other.has_value(), heap->largest_free());
    if (tensors.is_none()) return {};
    std::vector<Tensor> made = tensors_over(tensors, wanted);
    // PyTorch takes them from elsewhere where its allocator is set to do so.
    const bool inside = std::ranges::all_of(made, [&](const Tensor& tensor) { return heap->contains(tensor.data()); });
    helper.attr("placed")(inside);
    return made;
  }

 private:
  static Tensor tensor_over(TensorArgument made, TensorView view) {
    view.data = made.view.data;
    return {view, std::make_shared<FrameworkStorage>(std::move(made))};
  }
  /// Over those of the list `made`.
  static std::vector<Tensor> tensors_over(const py::object& made, std::span<const TensorView> wanted) {
    std::vector<Tensor> tensors;
    for (const TensorView& view : wanted) {
      const py::object tensor = made[py::int_(tensors.size())];
      tensors.push_back(tensor_over(Framework::instance().look(tensor, "a result"), view));
    }
    return tensors;
  }

  std::shared_ptr<PyObject> helper_;
};

}  // namespace

thread_local std::vector<py::object>* let_go_later = nullptr;

void let_go(PyObject* object) {
  if (Py_IsInitialized() == 0) return;  // at exit the interpreter has taken it
  const py::gil_scoped_acquire gil;
  auto ended = py::reinterpret_steal<py::object>(object);
  if (let_go_later != nullptr) let_go_later->push_back(std::move(ended));
}

std::shared_ptr<PyObject> keep(py::object object) { return {object.release().ptr(), let_go}; }

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
    if (segment == nullptr) return nullptr;
    SegmentsOut& out = segments_out();
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
    SegmentsOut& out = segments_out();
    const std::lock_guard lock(out.mutex);
    const auto found = out.heap_of.find(segment);
    if (found == out.heap_of.end()) return;
    heap = std::move(found->second);
    out.heap_of.erase(found);
  }
  heap->give_back(segment, stream);
}
