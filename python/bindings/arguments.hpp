// Arguments of the calls of deep_ep._native. Each is spelled once: a call lists its arguments by name, with the place
// that the value goes to. From the list come the reading of what Python gives and the signature in the docstring, of
// which deep_ep/_native.pyi is made.
#pragma once

#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "python/bindings/event.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// Puts positional arguments into their places, in the order of the list. TypeError names the argument.
class ArgumentReader {
 public:
  ArgumentReader(const char* call, const py::args& given) : call_(call), given_(given) {}

  template <class T>
  void operator()(const char* name, T& place) {
    if (next_ == given_.size()) wrong_number();
    read(PyTuple_GET_ITEM(given_.ptr(), static_cast<py::ssize_t>(next_++)), name, place);
  }
  /// After the last one: there must not be more.
  void finish() const {
    if (next_ != given_.size()) wrong_number();
  }

 private:
  static void read(py::handle object, const char* name, AnyTensor& place) {
    static_cast<TensorArgument&>(place) = Framework::instance().borrow(object, name, Accept::any_type);
  }
  static void read(py::handle object, const char* name, TensorArgument& place) {
    place = Framework::instance().borrow(object, name);
  }
  static void read(py::handle object, const char* name, std::optional<TensorArgument>& place) {
    if (!object.is_none()) place = Framework::instance().borrow(object, name);
  }
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, View& place) {
    place = Framework::instance().borrow(object, name).view;
  }
  template <class View>
  requires std::is_base_of_v<TensorSpec, View>
  static void read(py::handle object, const char* name, std::optional<View>& place) {
    if (!object.is_none()) place = Framework::instance().borrow(object, name).view;
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
  /// None or an Event.
  static void read(py::handle object, const char* name, EventHandle& place) {
    if (object.is_none()) return;
    if (!py::isinstance<Event>(object)) {
      throw py::type_error(fmt::format("{}.event is of type {}, expected a deep_ep.utils.EventHandle", name,
                                       Py_TYPE(object.ptr())->tp_name));
    }
    place = object.cast<const Event&>().event();
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
    if constexpr (std::is_integral_v<T>) return "an integer";
    if constexpr (std::is_floating_point_v<T>) return "a number";
    if constexpr (std::is_same_v<T, std::shared_ptr<Bootstrap>>) return "a Bootstrap";
    return "a tuple";
  }
  [[noreturn]] static void wrong_type(py::handle object, const char* name, const char* expected) {
    if (PyLong_Check(object.ptr())) {
      throw InvalidArgument(fmt::format("{} is {}, which is out of range", name, std::string(py::str(object))));
    }
    throw py::type_error(fmt::format("{} is of type {}, expected {}", name, Py_TYPE(object.ptr())->tp_name, expected));
  }
  [[noreturn]] void wrong_number() const {
    throw py::type_error(
        fmt::format("{} got {} arguments, which is not what its signature says", call_, given_.size()));
  }

  const char* call_;
  const py::args& given_;
  std::size_t next_ = 0;
};

/// The name of T in _native.pyi. Objects about which nothing else is known are tensors.
template <class T>
std::string python_type() {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (std::is_void_v<Plain>) return "None";
  if constexpr (std::is_same_v<Plain, bool>) return "bool";
  if constexpr (std::is_integral_v<Plain>) return "int";
  if constexpr (std::is_floating_point_v<Plain>) return "float";
  if constexpr (std::is_same_v<Plain, std::string>) return "str";
  if constexpr (std::is_same_v<Plain, EventHandle>) return "Optional[EventHandle]";
  if constexpr (std::is_same_v<Plain, py::tuple>) return "Tuple[Any, ...]";
  if constexpr (std::is_same_v<Plain, std::shared_ptr<Bootstrap>>) return "Bootstrap";
  if constexpr (std::is_same_v<Plain, py::object>) return "Any";
  if constexpr (requires { typename Plain::allocator_type; }) return "Sequence[torch.Tensor]";
  if constexpr (requires { typename Plain::value_type; }) return "Optional[torch.Tensor]";
  return "torch.Tensor";
}

/// "name(self, x: torch.Tensor, num_sms: int, /) -> None"
class SignatureWriter {
 public:
  explicit SignatureWriter(const char* name, bool method = true)
      : text_(std::string(name) + (method ? "(self" : "(")), empty_(!method) {}

  template <class T>
  void operator()(const char* name, const T& /*place*/) {
    add(name, python_type<T>());
  }
  void add(const char* name, const std::string& type) {
    text_ += std::string(empty_ ? "" : ", ") + name + ": " + type;
    empty_ = false;
  }
  /// "/": they are given by position.
  std::string finish(const std::string& returns) const { return text_ + (empty_ ? "" : ", /") + ") -> " + returns; }

 private:
  std::string text_;
  bool empty_;
};

/// The signature of a call that lists its arguments.
template <class Call>
std::string signature_of_call(const char* name, const std::string& returns) {
  SignatureWriter writer(name);
  Call().list(writer);
  return writer.finish(returns);
}

/// The signature of a function or method whose parameters have these names.
template <class Result, class... Parameters>
std::string signature_of(const char* name, std::initializer_list<const char*> names, bool method) {
  SignatureWriter writer(name, method);
  [[maybe_unused]] auto next = names.begin();
  (writer.add(*next++, python_type<Parameters>()), ...);
  return writer.finish(python_type<Result>());
}

}  // namespace deep_ep::bindings
