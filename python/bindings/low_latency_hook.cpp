#include "python/bindings/low_latency_hook.hpp"

#include <utility>

namespace deep_ep::bindings {

ReceiveHook::ReceiveHook(std::function<void()> receive, py::tuple needed)
    : receive_(std::move(receive)), needed_(std::move(needed)) {}

void ReceiveHook::call() {
  if (!receive_) return;
  const std::function<void()> receive = std::exchange(receive_, nullptr);
  const py::tuple needed = std::exchange(needed_, py::tuple());
  receive();
}

}  // namespace deep_ep::bindings
