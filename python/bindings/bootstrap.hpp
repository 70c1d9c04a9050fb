// How the ranks of Python's buffers find each other: a Bootstrap over an all-gather of Python.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_ep::bindings {

/// Adds the class Bootstrap.
void define_bootstrap(pybind11::module_& module);

}  // namespace deep_ep::bindings
