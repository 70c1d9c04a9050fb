// Objects of Python that work on the CPU may still use when the library lets go of them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <vector>

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

}  // namespace deep_ep::bindings
