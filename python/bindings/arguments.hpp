// Arguments of the calls of deep_ep._native, which Python gives by position.
#pragma once

#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

/// Puts arguments into their places, one after the other. TypeError names the argument.
class ArgumentReader {
 public:
  explicit ArgumentReader(const py::tuple& given) : given_(given) {}

  template <class T>
  void operator()(const char* name, T& place) {
    read(next(), name, place);
  }
  /// The same; None leaves the place as it is.
  template <class T>
  void if_given(const char* name, T& place) {
    const py::handle object = next();
    if (!object.is_none()) read(object, name, place);
  }
  template <class T>
  T get(const char* name) {
    T place{};
    (*this)(name, place);
    return place;
  }
  /// All arguments, for what must keep them.
  const py::tuple& given() const { return given_; }

  /// Rows of any element type, or their scales.
  static void read(py::handle object, const char* name, TensorArgument& place) { place = borrow(object, name); }
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, View& place) { place = view_of(object, name); }
  static void read(py::handle object, const char* name, Tensor& place) {
    place = Tensor::borrow(view_of(object, name));
  }
  template <class T>
  static void read(py::handle object, const char* name, std::optional<T>& place) {
    if (!object.is_none()) read(object, name, place.emplace());
  }
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, std::vector<View>& place) {
    for (const py::handle each : py::reinterpret_borrow<py::list>(object)) read(each, name, place.emplace_back());
  }
  static void read(py::handle object, const char* name, EventHandle& place) {
    if (object.is_none()) return;
    if (!py::isinstance<Event>(object)) wrong_type(object, name, "None, an EventOverlap or an EventHandle");
    place = object.cast<const Event&>().event;
  }
  /// Numbers, truth values and Python's own containers.
  template <class T>
  static void read(py::handle object, const char* name, T& place) {
    constexpr bool is_bool = std::is_same_v<T, bool>, is_integer = std::is_integral_v<T> && !is_bool;
    py::detail::make_caster<T> caster;
    if (!caster.load(object, true)) {
      if (!is_integer || !PyLong_Check(object.ptr())) {
        wrong_type(object, name, is_bool ? "True or False" : is_integer ? "an integer" : "a tuple");
      }
      throw InvalidArgument(fmt::format("{} is {}, which is out of range", name, std::string(py::str(object))));
    }
    place = py::detail::cast_op<T>(std::move(caster));
  }

 private:
  py::handle next() {
    PyObject* const object = PyTuple_GetItem(given_.ptr(), next_++);
    if (object == nullptr) throw py::error_already_set();
    return object;
  }
  [[noreturn]] static void wrong_type(py::handle object, const char* name, const char* expected) {
    throw py::type_error(fmt::format("{} is of type {}, expected {}", name, Py_TYPE(object.ptr())->tp_name, expected));
  }

  const py::tuple& given_;
  py::ssize_t next_ = 0;
};

}  // namespace deep_ep::bindings
