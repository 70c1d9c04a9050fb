#include "python/bindings/event.hpp"

#include <map>
#include <mutex>

#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

std::shared_ptr<Executor> gpu_executor(int device) {
  static auto* mutex = new std::mutex;
  static auto* executors = new std::map<int, std::shared_ptr<Executor>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<Executor>& executor = (*executors)[device];
  if (!executor) executor = make_cuda_executor(device);
  return executor;
}

Event Event::of_current_stream() {
  Event event;
  const py::module_ cuda = py::module_::import("torch.cuda");
  // Before CUDA starts there is no work on any stream; starting it here would cost memory on GPU 0.
  if (!cuda.attr("is_initialized")().cast<bool>()) return event;
  const int device = cuda.attr("current_device")().cast<int>();
  event.executor_ = gpu_executor(device);
  event.event_ = event.executor_->record_event(Framework::instance().current_stream({Device::Kind::cuda, device}));
  return event;
}

void Event::wait_on_current_stream() const {
  if (!executor_ || executor_->device().kind == Device::Kind::cpu) return;
  const StreamHandle stream = Framework::instance().current_stream(executor_->device());
  executor_->wait_event(stream, event_);
  for (const auto& result : results_) {
    if (const auto storage = result.lock()) storage->record_stream(stream);
  }
}

}  // namespace deep_ep::bindings
