// PyTorch as the bindings see it: tensors in, tensors out, the current stream. Nothing links with it.
//
// Newer versions (DLPack exchange API) are asked through C functions, in well under a microsecond per tensor, older
// ones (PyTorch 2.4 and later) through Python attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "deep_ep/executor.hpp"
#include "deep_ep/result_tensors.hpp"
#include "deep_ep/tensor.hpp"

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
  kComplex = 5,
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

namespace py = pybind11;

/// A tensor of the framework, for as long as this lives.
struct TensorArgument {
  py::object object;
  TensorView view;
  bool renamed = false;  ///< the library does not know its type: `view` has one of the same size
};

enum class Accept { library_types, any_type };

class Framework {
 public:
  /// PyTorch, found at the first call. Needs the GIL, as all methods do.
  static Framework& instance();

  /// TypeError unless `object` is a tensor. `any_type`: types that the library does not know are treated as types of
  /// their size. InvalidArgument, too, for a tensor whose values are not what lies in its memory.
  TensorArgument borrow(py::handle object, const char* name, Accept accept = Accept::library_types) const;
  /// The same for a tensor that was just made.
  TensorArgument look(py::handle object, const char* name, Accept accept = Accept::library_types) const;

  /// A tensor of the framework: the result itself, if it is one, or one that shares the memory and gives it back at its
  /// end; None if there is no memory.
  py::object hand_out(const Tensor& tensor) const;

  /// The stream that the calling thread's work for this device goes to; nullptr on the CPU.
  StreamHandle current_stream(const Device& device) const;

  /// A new tensor of the framework for the current stream. Ones without elements get one, as PyTorch gives them no
  /// address.
  TensorArgument empty(const TensorSpec& wanted) const;
  /// The torch.dtype.
  py::handle dtype_object(DType dtype) const { return types_[static_cast<std::size_t>(dtype)]; }
  /// The class of what the framework raises where memory ends.
  py::handle out_of_memory() const { return out_of_memory_; }

  /// Lets `tensor` know the current stream, on which a program drops it: often one that has used it. Without the GIL,
  /// too.
  void record_current_stream(const Tensor& tensor) const noexcept;

  /// For tests: from now on work as with an older PyTorch. Returns whether the newer way was in use.
  bool use_exchange_api(bool use);

 private:
  Framework();
  dlpack::DataType look_at_attributes(py::handle object, const char* name, TensorView& view) const;
  std::pair<py::tuple, py::tuple> known_tuples(const TensorSpec& spec) const;

  PyTypeObject* tensor_type_;
  const dlpack::ExchangeApi* exchange_ = nullptr;
  const dlpack::ExchangeApi* available_exchange_ = nullptr;
  // Never destroyed, as this is not: the objects live as long as the interpreter. nullptr: there is none.
  py::object from_capsule_;
  py::object raw_stream_;
  py::object empty_strided_;
  py::object quick_empty_on_cpu_;  ///< what compiled programs of PyTorch call: in half the time
  py::object quick_empty_on_gpu_;
  py::object as_strided_;
  py::object out_of_memory_;
  std::vector<py::object> types_;  ///< by DType
  mutable std::deque<std::pair<TensorSpec, std::pair<py::tuple, py::tuple>>> known_;
};

inline py::object hand_out(const Tensor& tensor) { return Framework::instance().hand_out(tensor); }
inline py::object hand_out(const std::optional<Tensor>& tensor) { return hand_out(tensor.value_or(Tensor())); }

// Events, and the executors that they are of.

/// One executor per GPU for the whole process, as events cross from one buffer to another: made at the first call for a
/// device, never destroyed: at interpreter exit other objects may still need it.
std::shared_ptr<Executor> gpu_executor(int device);

/// A point in a GPU's work. On the CPU there is nothing to wait for: calls end before they return.
class Event {
 public:
  /// All work that the calling thread's current stream holds.
  static Event of_current_stream();
  /// `kept`: tensors of the library that the event stands for. A stream that waits for it uses them.
  Event(std::shared_ptr<Executor> executor, EventHandle event, std::initializer_list<const Tensor*> kept)
      : executor_(std::move(executor)), event_(std::move(event)) {
    for (const Tensor* tensor : kept) kept_.emplace_back(tensor->storage());
  }

  /// The stream that is current now waits; the host does not.
  void wait_on_current_stream() const;
  const EventHandle& event() const { return event_; }

 private:
  Event() = default;

  std::shared_ptr<Executor> executor_;
  EventHandle event_;
  std::vector<std::weak_ptr<Tensor::Storage>> kept_;
};

/// The hook of a low-latency call with return_recv_hook: enqueues the receive part when called, with the GIL. The
/// buffer keeps all that this part needs, also when the hook is dropped.
struct ReceiveHook {
  std::function<void()> receive;

  void call() {
    if (!receive) return;
    const std::function<void()> once = receive;  // the program may drop the hook meanwhile
    once();
    receive = nullptr;  // only now: a hook that failed may come again
  }
};

// Results as tensors of PyTorch, whose memory is PyTorch's own.

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
void let_go(PyObject* object);
/// While it is set, it takes the objects that this thread lets go of: memory on the CPU is not freed in stream order,
/// so the work of a call may still use them.
extern thread_local std::vector<py::object>* let_go_later;  // NOLINT: one thread, one call
/// Any thread may let go of it.
std::shared_ptr<PyObject> keep(py::object object);

/// Asks PyTorch, with the GIL that calls have given up. `helper`: deep_ep.results.Results, for what needs more than
/// torch.empty.
std::shared_ptr<ResultTensors> make_framework_results(py::object helper);

}  // namespace deep_ep::bindings
