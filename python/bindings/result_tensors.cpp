#include "python/bindings/result_tensors.hpp"

#include <fmt/format.h>
#include <sys/types.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "deep_ep/error.hpp"

namespace deep_ep::bindings {
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

/// Tensors without elements get one, as PyTorch gives them no address.
py::tuple shape_of(const TensorView& view) {
  if (view.elements() == 0) return py::make_tuple(1);
  py::tuple shape(static_cast<std::size_t>(view.dims));
  for (int dim = 0; dim < view.dims; ++dim) shape[static_cast<std::size_t>(dim)] = view.size(dim);
  return shape;
}

py::list describe(std::span<const TensorView> wanted) {
  py::list list;
  for (const TensorView& view : wanted) {
    list.append(py::make_tuple(shape_of(view), Framework::instance().dtype_object(view.dtype)));
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
  const TensorView made = Framework::instance().borrow(object, "a result", Accept::made_here).view;
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
      std::optional<Framework::WithoutModes> without_modes;
      for (const TensorView& view : wanted) made.push_back(tensor_over(framework.empty(view, without_modes), view));
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
  const Framework::WithoutModes quick(Framework::instance());
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
