#include "csrc/buffer/low_latency/hook_queue.hpp"

#include <algorithm>
#include <utility>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

void HookQueue::require_room() const {
  if (waiting_.size() < kMostWaiting) return;
  fail<InvalidArgument>("{}: {} calls with return_recv_hook still wait for their hooks, at most {} may; call one first",
                        call_, waiting_.size(), kMostWaiting);
}

std::function<void()> HookQueue::add(std::function<void()> enqueue) {
  waiting_.push_back(std::make_shared<Part>(Part{std::move(enqueue)}));
  return [queue = weak_from_this(), part = waiting_.back()] {
    const auto alive = queue.lock();
    if (!alive) throw UseAfterDestroy("the hook of a low-latency call after the buffer's destroy");
    const OneThread::Use use(alive->one_thread_, "a hook of low-latency calls");
    alive->receive(part);
  };
}

void HookQueue::receive(const std::shared_ptr<Part>& part) {
  if (std::find(waiting_.begin(), waiting_.end(), part) == waiting_.end()) return;
  while (part->enqueue) receive_first();
}

void HookQueue::receive_all() {
  while (!waiting_.empty()) receive_first();
}

void HookQueue::receive_first() {
  waiting_.front()->enqueue();
  waiting_.front()->enqueue = nullptr;
  waiting_.pop_front();
}

}  // namespace deep_ep
