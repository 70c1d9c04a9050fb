// Exceptions of the library as Python exceptions: the classes of deep_ep/errors.py.
#pragma once

namespace deep_ep::bindings {

void register_errors();

}  // namespace deep_ep::bindings
