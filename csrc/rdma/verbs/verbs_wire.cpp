#include "csrc/rdma/verbs/verbs_wire.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/send_queue.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {

VerbsWire::VerbsWire(std::shared_ptr<Device> device, std::uint32_t completion_depth)
    : device_(std::move(device)),
      completion_queue_(std::make_shared<CompletionQueue>(device_, completion_depth)),
      completion_room_(completion_depth),
      events_(device_, [this](const AsyncEvent& event) {
        if (event.kind == AsyncEventKind::device_failed) device_failed_.store(true, std::memory_order_relaxed);
      }) {
  if (!device_->limits().atomics) {
    fail<InvalidArgument>("RDMA device {} has no 8-byte fetch-and-add, which signals need", device_->name());
  }
}

VerbsWire::~VerbsWire() = default;

QueuePair& VerbsWire::add_queue_pair(const QueuePairOptions& options, const PathOptions& path) {
  // An overrun completion queue loses completions, so every request under way has its place in it.
  if (options.send_depth > completion_room_) {
    fail<InvalidArgument>(
        "send queue depth {} of another queue pair on RDMA device {}, allowed: {}, what is left of "
        "the wire's completion queue",
        options.send_depth, device_->name(), completion_room_);
  }
  auto pair = std::make_unique<QueuePair>(completion_queue_, options, path);
  const auto serial = static_cast<std::uint32_t>(queues_.size());
  queues_.push_back(std::make_unique<SendQueue>(device_, std::move(pair), serial));
  completion_room_ -= options.send_depth;
  SendQueue& queue = *queues_.back();
  by_number_[queue.pair().number()] = &queue;
  return queue.pair();
}

SendQueue& VerbsWire::queue(std::uint32_t number) {
  const auto found = by_number_.find(number);
  if (found == by_number_.end()) {
    fail<InvalidArgument>("queue pair {:#x} is not one of this wire's on RDMA device {}", number, device_->name());
  }
  return *found->second;
}

void VerbsWire::check_device() const {
  if (device_failed_.load(std::memory_order_relaxed)) {
    fail<SystemError>("RDMA device {} reported a fatal error: nothing on it completes any more", device_->name());
  }
}

std::size_t VerbsWire::post(std::span<const WireOperation> operations) {
  check_device();
  std::size_t taken = 0;
  while (taken < operations.size()) {
    // Neighbours of one queue pair go to the device together.
    const std::uint32_t number = operations[taken].queue_pair;
    std::size_t end = taken + 1;
    while (end < operations.size() && operations[end].queue_pair == number) ++end;
    const std::size_t accepted = queue(number).post(operations.subspan(taken, end - taken), ready_);
    taken += accepted;
    if (taken < end) break;
  }
  return taken;
}

std::size_t VerbsWire::poll(std::span<WireCompletion> completions) {
  check_device();
  if (ready_.size() < completions.size()) {
    std::array<ibv_wc, 32> polled;
    const int count = ibv_poll_cq(completion_queue_->get(), static_cast<int>(polled.size()), polled.data());
    if (count < 0) fail<SystemError>("RDMA device {}: ibv_poll_cq gives {}", device_->name(), count);
    for (int i = 0; i < count; ++i) take(polled[static_cast<std::size_t>(i)]);
  }
  const std::size_t count = std::min(ready_.size(), completions.size());
  std::copy_n(ready_.begin(), count, completions.begin());
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

void VerbsWire::take(const ibv_wc& completion) {
  const std::uint64_t serial = completion.wr_id >> 32;
  if (serial >= queues_.size()) {
    fail<SystemError>("RDMA device {}: a completion has the id {:#x}, which nothing was posted with", device_->name(),
                      completion.wr_id);
  }
  queues_[serial]->complete(completion, ready_);
}

}  // namespace deep_ep::rdma::verbs
