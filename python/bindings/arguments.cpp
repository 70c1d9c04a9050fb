#include "python/bindings/arguments.hpp"

#include <fmt/format.h>

#include "deep_ep/error.hpp"
#include "python/bindings/event.hpp"

namespace deep_ep::bindings {

void ArgumentReader::read(py::handle object, const char* name, AnyTensor& place) {
  static_cast<TensorArgument&>(place) = Framework::instance().borrow(object, name, Accept::any_type);
}

void ArgumentReader::read(py::handle object, const char* name, TensorArgument& place) {
  place = Framework::instance().borrow(object, name);
}

void ArgumentReader::read(py::handle object, const char* name, std::optional<TensorArgument>& place) {
  if (!object.is_none()) place = Framework::instance().borrow(object, name);
}

void ArgumentReader::read(py::handle object, const char* name, EventHandle& place) {
  if (object.is_none()) return;
  if (!py::isinstance<Event>(object)) {
    throw py::type_error(fmt::format("{}.event is of type {}, expected a deep_ep.utils.EventHandle", name,
                                     Py_TYPE(object.ptr())->tp_name));
  }
  place = object.cast<const Event&>().event();
}

void ArgumentReader::wrong_type(py::handle object, const char* name, const char* expected) {
  if (PyLong_Check(object.ptr())) {
    throw InvalidArgument(fmt::format("{} is {}, which is out of range", name, std::string(py::str(object))));
  }
  throw py::type_error(fmt::format("{} is of type {}, expected {}", name, Py_TYPE(object.ptr())->tp_name, expected));
}

void ArgumentReader::wrong_number() const {
  throw py::type_error(fmt::format("{} got {} arguments, which is not what its signature says", call_, given_.size()));
}

}  // namespace deep_ep::bindings
