#include "python/bindings/leftovers.hpp"

#include <utility>

namespace deep_ep::bindings {

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

}  // namespace deep_ep::bindings
