#include "python/bindings/low_latency_hook.hpp"

#include <functional>

namespace deep_ep::bindings {

void ReceiveHook::call() {
  if (!receive_) return;
  const std::function<void()> receive = receive_;  // the program may drop the hook meanwhile
  receive();
  receive_ = nullptr;  // only now: a hook that failed may come again
}

}  // namespace deep_ep::bindings
