#include "python/bindings/low_latency_hook.hpp"

#include <utility>

namespace deep_ep::bindings {

void ReceiveHook::call() {
  if (!receive_) return;
  const std::function<void()> receive = std::exchange(receive_, nullptr);
  receive();
}

}  // namespace deep_ep::bindings
