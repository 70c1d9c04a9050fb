#include "python/bindings/executors.hpp"

#include <map>
#include <mutex>

namespace deep_ep::bindings {

std::shared_ptr<Executor> gpu_executor(int device) {
  static auto* mutex = new std::mutex;
  static auto* executors = new std::map<int, std::shared_ptr<Executor>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<Executor>& executor = (*executors)[device];
  if (!executor) executor = make_cuda_executor(device);
  return executor;
}

}  // namespace deep_ep::bindings
