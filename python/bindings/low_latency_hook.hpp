// What a low-latency call with return_recv_hook returns besides its results.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>

namespace deep_ep::bindings {

namespace py = pybind11;

/// Enqueues the receive part when called; a second call does nothing. Keeps what that part needs, so that the program
/// may let go of everything else.
class ReceiveHook {
 public:
  /// `receive` is called with the GIL. `needed`: the buffer and tensors of the caller.
  ReceiveHook(std::function<void()> receive, py::tuple needed);
  void call();

 private:
  std::function<void()> receive_;
  py::tuple needed_;
};

}  // namespace deep_ep::bindings
