// Results as tensors of PyTorch, whose memory is PyTorch's own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "deep_ep/result_tensors.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// Lets go of an object from any thread, with or without the GIL.
void let_go(PyObject* object);

/// Memory on the CPU is not freed in stream order. So an object without another owner is kept until the work has ended.
/// Thread-safe.
class Leftovers {
 public:
  ~Leftovers() { clear(); }
  /// Lets go of `object`, which work may use: at `clear`, if it has no other owner. Without `leftovers`: now.
  static void add(const std::shared_ptr<Leftovers>& leftovers, PyObject* object);
  /// The work has ended. Without the GIL.
  void clear();

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

/// The tensor of PyTorch behind a result, for as long as the library has it.
class FrameworkStorage final : public Tensor::Storage {
 public:
  /// `made`: the shape and strides of `object`.
  FrameworkStorage(py::object object, const TensorSpec& made, std::shared_ptr<Leftovers> leftovers)
      : object_(object.release().ptr()), made_(made), leftovers_(std::move(leftovers)) {}
  ~FrameworkStorage() override { Leftovers::add(leftovers_, object_); }
  FrameworkStorage(const FrameworkStorage&) = delete;
  FrameworkStorage& operator=(const FrameworkStorage&) = delete;
  /// PyTorch is told of streams by its own users.
  void record_stream(StreamHandle) override {}
  /// Needs the GIL.
  py::object object() const { return py::reinterpret_borrow<py::object>(object_); }
  /// Has the object the shape and the strides of `view`?
  bool looks_like(const TensorSpec& view) const {
    if (view.dims != made_.dims || view.elements() == 0) return false;
    for (int dim = 0; dim < view.dims; ++dim) {
      if (view.size(dim) != made_.size(dim) || view.stride(dim) != made_.stride(dim)) return false;
    }
    return true;
  }

 private:
  PyObject* object_;
  TensorSpec made_;
  std::shared_ptr<Leftovers> leftovers_;
};

/// Asks PyTorch, with the GIL that calls have given up. `helper`: deep_ep.results.Results, for what needs more than
/// torch.empty; `leftovers`: of a buffer on the CPU, else nullptr.
class FrameworkResults final : public ResultTensors {
 public:
  FrameworkResults(py::object helper, std::shared_ptr<Leftovers> leftovers)
      : helper_(helper.release().ptr()), leftovers_(std::move(leftovers)) {}
  ~FrameworkResults() override { let_go(helper_); }
  FrameworkResults(const FrameworkResults&) = delete;
  FrameworkResults& operator=(const FrameworkResults&) = delete;

  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order& order) override;
  std::vector<Tensor> make_in_heap(std::span<const TensorView> wanted, const Order& order,
                                   const std::shared_ptr<HeapPieces>& heap) override;

 private:
  Tensor tensor_over(Framework::Made made, TensorView view) const;
  Tensor tensor_over(py::object object, const TensorView& view) const;

  PyObject* helper_;
  std::shared_ptr<Leftovers> leftovers_;
};

}  // namespace deep_ep::bindings
