#include "python/bindings/low_latency_handle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "deep_ep/error.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {
namespace {

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

}  // namespace

/// The memory of src_info, as the framework holds it.
class LowLatencyHandles::Keeper final : public Tensor::Storage {
 public:
  Keeper(LowLatencyHandle handle, StreamHandle stream) : stream(stream), handle_(std::move(handle)) {}
  /// The handle's tensors share their memory.
  void record_stream(StreamHandle stream) override { handle_.src_info.record_stream(stream); }
  const LowLatencyHandle& handle() const { return handle_; }
  std::optional<TensorView> combine_buffer;
  const StreamHandle stream;  ///< that the dispatch was called on

 private:
  LowLatencyHandle handle_;
};

/// Stands in a tuple for its two tensors until the program looks at the tuple.
struct LowLatencyHandles::Unmade {
  static constexpr const char* kName = "deep_ep: tensors of a low-latency handle";

  static py::object of(std::shared_ptr<Keeper> keeper) {
    return py::capsule(new std::shared_ptr<Keeper>(std::move(keeper)), kName, [](PyObject* capsule) {
      delete static_cast<std::shared_ptr<Keeper>*>(PyCapsule_GetPointer(capsule, kName));
    });
  }
  /// Of handle[0]; nullptr where the program has looked, or the tuple is one of its own.
  static std::shared_ptr<Keeper> in(PyObject* handle) {
    PyObject* const first = PyTuple_GET_ITEM(handle, 0);
    if (first == nullptr || PyCapsule_IsValid(first, kName) == 0) return nullptr;
    return *static_cast<std::shared_ptr<Keeper>*>(PyCapsule_GetPointer(first, kName));
  }
};

void LowLatencyHandles::make_tensors(PyObject* handle) {
  if (PyTuple_GET_SIZE(handle) != static_cast<py::ssize_t>(kLength)) return;
  const std::shared_ptr<Keeper> keeper = Unmade::in(handle);
  if (!keeper) return;
  const Framework& framework = Framework::instance();
  const LowLatencyHandle& of_dispatch = keeper->handle();
  keeper->record_stream(keeper->stream);
  keeper->record_stream(framework.current_stream(of_dispatch.src_info.view().device));
  std::array<py::object, 2> made = {framework.hand_out(Tensor(of_dispatch.src_info.view(), keeper)),
                                    framework.hand_out(of_dispatch.layout_range)};
  if (Unmade::in(handle) == nullptr) return;  // another thread was faster
  for (std::size_t i = 0; i < made.size(); ++i) {
    PyObject* const unmade = PyTuple_GET_ITEM(handle, static_cast<py::ssize_t>(i));
    PyTuple_SET_ITEM(handle, static_cast<py::ssize_t>(i), made[i].release().ptr());
    Py_DECREF(unmade);
  }
}

py::handle LowLatencyHandles::type() {
  static PyObject* const made = [] {
    const py::handle plain(reinterpret_cast<PyObject*>(&PyTuple_Type));
    py::dict contents;
    contents["__slots__"] = py::tuple();
    contents["__module__"] = "deep_ep";
    contents["__doc__"] =
        "A tuple (src_info, layout_range, M, H, E), whose tensors are made when the program looks at it.";
    const py::object type =
        py::handle(reinterpret_cast<PyObject*>(&PyType_Type))("LowLatencyHandle", py::make_tuple(plain), contents);
    // All of a tuple's methods that see its elements.
    for (const char* const name :
         {"__getitem__", "__iter__", "__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
          "__hash__", "__repr__", "__add__", "__mul__", "__rmul__", "__getnewargs__", "index", "count"}) {
      const auto method = [of_tuple = py::object(plain.attr(name))](const py::args& given) {
        make_tensors(given[0].ptr());
        return of_tuple(*given);
      };
      type.attr(name) = py::cpp_function(method, py::name(name), py::is_method(type));
    }
    const auto as_tuple = [](const py::object& handle) { return py::tuple(py::list(handle)); };
    // Python asks the class that is derived before it joins two tuples by itself.
    type.attr("__radd__") = py::cpp_function(
        [as_tuple](const py::object& handle, const py::tuple& before) { return before + as_tuple(handle); },
        py::is_method(type));
    // Copies are plain tuples.
    type.attr("__reduce__") = py::cpp_function(
        [as_tuple, plain](const py::object& handle) { return py::make_tuple(plain, py::make_tuple(as_tuple(handle))); },
        py::is_method(type));
    // For PyTorch, too, a handle is its elements.
    py::module_::import("torch.utils._pytree")
        .attr("register_pytree_node")(
            type,
            py::cpp_function([](const py::object& handle) { return py::make_tuple(py::list(handle), py::none()); }),
            py::cpp_function([type](const py::object& elements, const py::object&) { return type(elements); }));
    return py::object(type).release().ptr();
  }();
  return made;
}

py::object LowLatencyHandles::hand_out(const LowLatencyHandle& handle, StreamHandle stream) {
  const auto keeper = std::make_shared<Keeper>(handle, stream);
  by_address_.insert_or_assign(handle.src_info.data(), keeper);
  if (by_address_.size() > tidy_at_) {
    std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
    tidy_at_ = std::max<std::size_t>(64, 2 * by_address_.size());
  }
  auto* const of_handles = reinterpret_cast<PyTypeObject*>(type().ptr());
  auto result = py::reinterpret_steal<py::object>(of_handles->tp_alloc(of_handles, kLength));
  if (!result) throw py::error_already_set();
  const py::object unmade = Unmade::of(keeper);
  std::array<py::object, kLength> elements = {unmade, unmade, py::int_(handle.max_tokens), py::int_(handle.hidden),
                                              py::int_(handle.num_experts)};
  for (std::size_t i = 0; i < kLength; ++i) {
    PyTuple_SET_ITEM(result.ptr(), static_cast<py::ssize_t>(i), elements[i].release().ptr());
  }
  return result;
}

std::shared_ptr<LowLatencyHandles::Keeper> LowLatencyHandles::keeper(const py::tuple& handle) const {
  const std::shared_ptr<Keeper> unmade = Unmade::in(handle.ptr());
  const auto entry = by_address_.find(unmade ? unmade->handle().src_info.data()
                                             : Framework::instance().borrow(handle[0], "handle[0]").view.data);
  const auto known = entry == by_address_.end() ? nullptr : entry->second.lock();
  return unmade && known != unmade ? nullptr : known;
}

void LowLatencyHandles::remember_combine_buffer(const py::tuple& handle, const TensorView& rows) {
  keeper(handle)->combine_buffer = rows;
}

std::optional<TensorView> LowLatencyHandles::combine_buffer(const py::tuple& handle) const {
  return keeper(handle)->combine_buffer;
}

LowLatencyHandle LowLatencyHandles::find(const py::tuple& handle) const {
  if (handle.size() != kLength) {
    throw InvalidArgument(
        fmt::format("handle has {} elements, expected the tuple of {} that low_latency_dispatch "
                    "returned",
                    handle.size(), kLength));
  }
  const std::shared_ptr<Keeper> kept = keeper(handle);
  if (!kept) {
    make_tensors(handle.ptr());
    const TensorView src_info = Framework::instance().borrow(handle[0], "handle[0]").view;
    throw InvalidArgument(
        fmt::format("handle[0] is {}, but not the tensor that this buffer's low_latency_dispatch "
                    "returned (a copy does not do: combine needs what lies behind it)",
                    src_info.describe()));
  }
  LowLatencyHandle result = kept->handle();
  require_same(2, number(handle, 2), result.max_tokens);
  result.hidden = number(handle, 3);
  require_same(4, number(handle, 4), result.num_experts);
  return result;
}

}  // namespace deep_ep::bindings
