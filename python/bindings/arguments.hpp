// Arguments of the calls of deep_ep._native, which Python gives by position.
#pragma once

#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

/// Rows of any element type, or (8-bit rows, their scales).
struct RowsArgument {
  TensorArgument rows;
  std::optional<TensorArgument> scales;
};
/// Places of tensors that combine adds once: one, or two of which either may be missing.
struct Biases {
  std::optional<ConstTensorView>&first, &second;
};

/// A place that None leaves as it is.
template <class T>
struct OrNone {
  T& place;
};
template <class T>
OrNone<T> or_none(T& place) {
  return {place};
}

/// Puts the arguments of `call` into their places, one after the other. TypeError names the argument.
class ArgumentReader {
 public:
  ArgumentReader(const char* call, const py::tuple& given) : call_(call), given_(given) {}

  template <class T>
  void operator()(const char* name, T&& place) {
    if (next_ == given_.size()) wrong_number();
    read(PyTuple_GET_ITEM(given_.ptr(), static_cast<py::ssize_t>(next_++)), name, place);
  }
  template <class T>
  T get(const char* name) {
    T place{};
    (*this)(name, place);
    return place;
  }
  /// All have been read.
  void end() const {
    if (next_ != given_.size()) wrong_number();
  }
  /// All arguments, for what must keep them.
  const py::tuple& given() const { return given_; }

 private:
  static void read(py::handle object, const char* name, TensorArgument& place) {
    place = Framework::instance().borrow(object, name);
  }
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, View& place) {
    place = Framework::instance().borrow(object, name).view;
  }
  static void read(py::handle object, const char* name, Tensor& place) {
    place = Tensor::borrow(Framework::instance().borrow(object, name).view);
  }
  template <class T>
  static void read(py::handle object, const char* name, std::optional<T>& place) {
    if (!object.is_none()) read(object, name, place.emplace());
  }
  template <class T>
  static void read(py::handle object, const char* name, OrNone<T>& or_none) {
    if (!object.is_none()) read(object, name, or_none.place);
  }
  static void read(py::handle object, const char* name, RowsArgument& place) {
    const auto pair = pair_of(object, name, "(rows, scales)");
    const Framework& framework = Framework::instance();
    place.rows = framework.borrow(pair ? py::handle(pair->first) : object, name, Accept::any_type);
    if (pair) place.scales = framework.borrow(pair->second, "x_scales", Accept::any_type);
  }
  static void read(py::handle object, const char* name, Biases& place) {
    const auto pair = pair_of(object, name, "two");
    read(pair ? py::handle(pair->first) : object, name, place.first);
    if (pair) read(pair->second, name, place.second);
    if (!place.first) std::swap(place.first, place.second);
  }
  /// The elements of a list or tuple, which must be of two; nothing for other objects.
  static std::optional<std::pair<py::object, py::object>> pair_of(py::handle object, const char* name,
                                                                  const char* elements) {
    if (!PyTuple_Check(object.ptr()) && !PyList_Check(object.ptr())) return std::nullopt;
    const auto given = py::reinterpret_borrow<py::sequence>(object);
    if (given.size() == 2) return std::pair<py::object, py::object>(given[0], given[1]);
    throw InvalidArgument(fmt::format("{} is a {} of {}, expected a tensor or {}", name, Py_TYPE(object.ptr())->tp_name,
                                      given.size(), elements));
  }
  /// A list or tuple of tensors.
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, std::vector<View>& place) {
    if (!py::isinstance<py::sequence>(object)) wrong_type(object, name, "a list of tensors");
    for (const py::handle each : py::reinterpret_borrow<py::sequence>(object)) {
      const std::string of_list = std::string(name) + "[" + std::to_string(place.size()) + "]";
      place.push_back(Framework::instance().borrow(each, of_list.c_str()).view);
    }
  }
  /// None, an Event, or an object with one or None as its `event`.
  static void read(py::handle object, const char* name, EventHandle& place) {
    if (object.is_none()) return;
    auto event = py::reinterpret_borrow<py::object>(object);
    if (!py::isinstance<Event>(object)) {
      event = py::getattr(object, "event", py::int_());
      if (event.is_none()) return;
      if (!py::isinstance<Event>(event)) wrong_type(object, name, "None, an EventOverlap or an EventHandle");
    }
    place = event.cast<const Event&>().event();
  }
  /// Numbers, truth values and Python's own containers.
  template <class T>
  static void read(py::handle object, const char* name, T& place) {
    py::detail::make_caster<T> caster;
    if (!caster.load(object, true)) wrong_type(object, name, expected_text<T>());
    place = py::detail::cast_op<T>(std::move(caster));
  }
  /// The forms in which a value of type T may be given, in words.
  template <class T>
  static constexpr const char* expected_text() {
    if constexpr (std::is_same_v<T, bool>) return "True or False";
    if constexpr (std::is_integral_v<T>) return kInteger;
    if constexpr (std::is_floating_point_v<T>) return "a number";
    if constexpr (std::is_same_v<T, std::shared_ptr<Bootstrap>>) return "a Bootstrap";
    return "a tuple";
  }
  [[noreturn]] static void wrong_type(py::handle object, const char* name, const std::string& expected) {
    if (PyLong_Check(object.ptr()) && expected == kInteger) {
      throw InvalidArgument(fmt::format("{} is {}, which is out of range", name, std::string(py::str(object))));
    }
    throw py::type_error(fmt::format("{} is of type {}, expected {}", name, Py_TYPE(object.ptr())->tp_name, expected));
  }
  [[noreturn]] void wrong_number() const {
    throw py::type_error(
        fmt::format("{} got {} arguments, which is not what its signature says", call_, given_.size()));
  }

  static constexpr const char* kInteger = "an integer";

  const char* call_;
  const py::tuple& given_;
  std::size_t next_ = 0;
};

}  // namespace deep_ep::bindings
