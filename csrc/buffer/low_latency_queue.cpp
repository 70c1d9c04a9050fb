#include "csrc/buffer/low_latency_queue.hpp"

#include <algorithm>
#include <utility>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

void LowLatencyQueue::require_room() const {
  if (waiting_.size() < kMostWaiting) return;
  fail<InvalidArgument>("{}: {} calls with return_recv_hook still wait for their hooks, at most {} may; call one first",
                        call_, waiting_.size(), kMostWaiting);
}

std::shared_ptr<LowLatencyQueue::Part> LowLatencyQueue::wait_for_hook(Part part) {
  waiting_.push_back(std::make_shared<Part>(std::move(part)));
  return waiting_.back();
}

void LowLatencyQueue::receive(const std::shared_ptr<Part>& part) {
  if (std::find(waiting_.begin(), waiting_.end(), part) == waiting_.end()) return;
  while (part->enqueue) receive_first();
}

void LowLatencyQueue::receive_all() {
  while (!waiting_.empty()) receive_first();
}

void LowLatencyQueue::receive_first() {
  Part& first = *waiting_.front();
  executor_->make_current();
  order(first.stream);
  first.enqueue();
  first.enqueue = nullptr;
  waiting_.pop_front();
}

void LowLatencyQueue::order(StreamHandle stream) {
  // A graph that is being recorded and work outside of it cannot wait for each other: there the caller keeps the order.
  if (used_ && stream != last_ && executor_->is_capturing(last_) == executor_->is_capturing(stream)) {
    executor_->wait_event(stream, executor_->record_event(last_));
  }
  used_ = true;
  last_ = stream;
}

}  // namespace deep_ep
