// deep_ep._native.Buffer.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_ep::bindings {

/// Adds the class.
void define_buffer(pybind11::module_& module);

}  // namespace deep_ep::bindings
