// The hook that a low-latency call with return_recv_hook returns besides its results.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <utility>

namespace deep_ep::bindings {

namespace py = pybind11;

/// Enqueues the receive part when called; a second call does nothing. What that part needs the buffer keeps, also when
/// the hook is dropped.
class ReceiveHook {
 public:
  /// `receive` is called with the GIL.
  explicit ReceiveHook(std::function<void()> receive) : receive_(std::move(receive)) {}
  void call();

 private:
  std::function<void()> receive_;
};

}  // namespace deep_ep::bindings
