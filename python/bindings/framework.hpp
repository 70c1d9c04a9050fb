// PyTorch as the bindings see it: tensors in, tensors out, the current stream. Nothing links with it. All of it needs
// the GIL, unless a comment says otherwise.
//
// Newer versions (DLPack exchange API) are asked through C functions, in well under a microsecond per tensor, older
// ones (PyTorch 2.4 and later) through Python attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "deep_ep/executor.hpp"
#include "deep_ep/result_tensors.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// A tensor of the framework, for as long as this lives.
struct TensorArgument {
  py::object object;
  TensorView view;
  bool renamed = false;  ///< the library does not know its type: `view` has one of the same size
};

/// A tensor of any type. TypeError for what is none, InvalidArgument for one whose memory does not hold its values,
/// which is not asked of tensors that are `made_here`.
TensorArgument borrow(py::handle object, const char* name, bool made_here = false);
/// The same of a type that the library knows, else InvalidArgument.
TensorView view_of(py::handle object, const char* name);
/// A tensor of the framework: the result itself, if it is one, or one that shares the memory and gives it back at its
/// end; None if there is no memory.
py::object hand_out(const Tensor& tensor);
inline py::object hand_out(const std::optional<Tensor>& tensor) { return hand_out(tensor.value_or(Tensor())); }
/// The stream that the calling thread's work for this device goes to; nullptr on the CPU.
StreamHandle current_stream(const Device& device);

/// One executor per GPU for the whole process, as events cross from one buffer to another: made at the first call for a
/// device, never destroyed: at interpreter exit other objects may still need it.
std::shared_ptr<Executor> gpu_executor(int device);

/// A point in a GPU's work. On the CPU there is nothing to wait for: calls end before they return.
struct Event {
  Executor* gpu = nullptr;  ///< of gpu_executor; nullptr: on the CPU
  EventHandle event = {};
  /// Tensors of the library that the event stands for. A stream that waits for it uses them.
  std::vector<std::weak_ptr<Tensor::Storage>> kept = {};

  /// All work that the calling thread's current stream holds.
  static Event of_current_stream();
  /// The stream that is current now waits; the host does not.
  void wait_on_current_stream() const;
};

/// Sets a variable for as long as it lives.
template <class T>
class SetWithin {
 public:
  SetWithin(T& place, T value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~SetWithin() { place_ = std::move(before_); }
  SetWithin(const SetWithin&) = delete;
  SetWithin& operator=(const SetWithin&) = delete;

 private:
  T& place_;
  T before_;
};

/// Lets go of an object from any thread, with or without the GIL.
struct LetGo {
  void operator()(PyObject* object) const;
};
using KeptObject = std::unique_ptr<PyObject, LetGo>;
inline KeptObject keep(py::object object) { return KeptObject(object.release().ptr()); }
/// While it is set, it takes the objects that this thread lets go of: memory on the CPU is not freed in stream order,
/// so the work of a call may still use them.
inline thread_local std::vector<py::object>* let_go_later = nullptr;  // NOLINT: one thread, one call

/// Asks PyTorch, with the GIL that calls have given up. `helper`: deep_ep.results.Results, for what needs more than
/// torch.empty.
std::shared_ptr<ResultTensors> make_framework_results(py::object helper);

}  // namespace deep_ep::bindings
