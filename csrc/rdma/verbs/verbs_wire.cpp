#include "csrc/rdma/verbs/verbs_wire.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {

Syndrome syndrome_of(int status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return Syndrome::none;
    case IBV_WC_LOC_LEN_ERR:
      return Syndrome::local_length;
    case IBV_WC_LOC_PROT_ERR:
      return Syndrome::local_protection;
    case IBV_WC_WR_FLUSH_ERR:
      return Syndrome::flushed;
    case IBV_WC_MW_BIND_ERR:
      return Syndrome::memory_window_bind;
    case IBV_WC_BAD_RESP_ERR:
      return Syndrome::bad_response;
    case IBV_WC_LOC_ACCESS_ERR:
      return Syndrome::local_access;
    case IBV_WC_REM_INV_REQ_ERR:
      return Syndrome::remote_invalid_request;
    case IBV_WC_REM_ACCESS_ERR:
      return Syndrome::remote_access;
    case IBV_WC_REM_OP_ERR:
      return Syndrome::remote_operation;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return Syndrome::transport_retries_exceeded;
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return Syndrome::receiver_not_ready_retries_exceeded;
    case IBV_WC_REM_ABORT_ERR:
      return Syndrome::remote_aborted;
    default:
      // Local queue pair errors, and what has no code of its own (fatal, general).
      return Syndrome::local_queue_pair;
  }
}

VerbsWire::VerbsWire(std::shared_ptr<Device> device, std::size_t count, std::uint32_t depth, const PathOptions& path)
    : device_(std::move(device)),
      // An overrun completion queue loses completions, so every request under way has its place in it.
      completion_queue_(std::make_shared<CompletionQueue>(device_, static_cast<std::uint32_t>(count) * depth)),
      events_(device_, [this](const AsyncEvent& event) {
        if (event.kind == AsyncEventKind::device_failed) device_failed_.store(true, std::memory_order_relaxed);
      }) {
  if (device_->limits().atomic_cap == IBV_ATOMIC_NONE) {
    fail<InvalidArgument>("RDMA device {} has no 8-byte fetch-and-add, which signals need", device_->name());
  }
  for (std::uint32_t serial = 0; serial < count; ++serial) {
    queues_.push_back({std::make_unique<QueuePair>(completion_queue_, depth, path), serial});
    by_number_[queues_.back().pair->number()] = serial;
  }
}

VerbsWire::~VerbsWire() = default;

void VerbsWire::check_device() const {
  if (device_failed_.load(std::memory_order_relaxed)) {
    fail<SystemError>("RDMA device {} reported a fatal error: nothing on it completes any more", device_->name());
  }
}

std::size_t VerbsWire::post(std::span<const Operation> operations) {
  check_device();
  const auto found = by_number_.find(operations.front().queue_pair);
  if (found == by_number_.end()) {
    fail<InvalidArgument>("queue pair {:#x} is not one of this wire's on RDMA device {}", operations.front().queue_pair,
                          device_->name());
  }
  SendQueue& queue = queues_[found->second];
  if (queue.failed) return operations.size();
  if (queue.oldest == queue.end) queue.oldest = queue.end = operations.front().index;
  const std::uint32_t depth = queue.pair->send_depth();

  constexpr std::size_t kBatch = 32;  // work requests that are handed over by one call
  std::array<ibv_send_wr, kBatch> requests;
  std::array<ibv_sge, kBatch> pieces;
  std::size_t taken = 0;
  while (taken < operations.size()) {
    const auto room = static_cast<std::size_t>(depth - (queue.end - queue.oldest));
    const std::size_t count = std::min({operations.size() - taken, room, kBatch});
    if (count == 0) break;
    for (std::size_t i = 0; i < count; ++i) {
      const Operation& operation = operations[taken + i];
      ibv_send_wr& request = requests[i];
      request = {};
      request.wr_id = std::uint64_t{queue.serial} << 32 | static_cast<std::uint32_t>(operation.index);
      request.next = i + 1 < count ? &requests[i + 1] : nullptr;
      // Verbs drop empty pieces, some providers refuse them.
      request.sg_list = operation.length > 0 ? &pieces[i] : nullptr;
      request.num_sge = operation.length > 0 ? 1 : 0;
      pieces[i] = {operation.local.address, operation.length, operation.local.key};
      if (operation.opcode == device::rdma::kOpcodeFetchAdd) {
        request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        request.wr.atomic = {.remote_addr = operation.remote.address,
                             .compare_add = operation.add,
                             .swap = 0,
                             .rkey = operation.remote.key};
      } else {
        request.opcode = IBV_WR_RDMA_WRITE;
        request.wr.rdma = {.remote_addr = operation.remote.address, .rkey = operation.remote.key};
      }
      if (operation.signalled || ++queue.since_reported >= std::max(depth / 4, 1U)) {
        request.send_flags |= IBV_SEND_SIGNALED;
        queue.since_reported = 0;
      }
    }

    ibv_send_wr* refused = nullptr;
    const int error = ibv_post_send(queue.pair->get(), requests.data(), &refused);
    const auto accepted = error == 0           ? count
                          : refused != nullptr ? static_cast<std::size_t>(refused - requests.data())
                                               : 0;
    queue.end += accepted;
    taken += accepted;
    if (error == 0) continue;
    if (error != ENOMEM) {
      fail<SystemError>("RDMA device {}: ibv_post_send to queue pair {:#x}: {}", device_->name(), queue.pair->number(),
                        errno_text(error));
    }
    // Full, although there should be room: the next request must ask for a completion, or nothing frees room.
    queue.since_reported = depth;
    break;
  }
  return taken;
}

std::size_t VerbsWire::poll(std::span<WireCompletion> completions) {
  check_device();
  std::array<ibv_wc, 32> polled;
  const int count = ibv_poll_cq(completion_queue_->get(), static_cast<int>(std::min(polled.size(), completions.size())),
                                polled.data());
  if (count < 0) fail<SystemError>("RDMA device {}: ibv_poll_cq gives {}", device_->name(), count);
  std::size_t told = 0;
  for (int i = 0; i < count; ++i) {
    if (const auto completion = take(polled[static_cast<std::size_t>(i)])) completions[told++] = *completion;
  }
  return told;
}

std::optional<WireCompletion> VerbsWire::take(const ibv_wc& completion) {
  const std::uint64_t serial = completion.wr_id >> 32;
  if (serial >= queues_.size()) {
    fail<SystemError>("RDMA device {}: a completion has the id {:#x}, which nothing was posted with", device_->name(),
                      completion.wr_id);
  }
  SendQueue& queue = queues_[serial];
  // The device reports no other failure of a queue pair after the first one.
  if (queue.failed) return {};
  const auto behind = static_cast<std::uint32_t>(completion.wr_id) - static_cast<std::uint32_t>(queue.oldest);
  if (behind >= queue.end - queue.oldest) {
    fail<SystemError>("RDMA device {}: queue pair {:#x} completed a request that was not posted", device_->name(),
                      queue.pair->number());
  }
  // Everything before it succeeded: requests of one queue pair complete in order.
  const std::uint64_t id = queue.oldest + behind;
  queue.oldest = id + 1;
  const Syndrome syndrome = syndrome_of(completion.status);
  queue.failed = syndrome != Syndrome::none;
  return WireCompletion{queue.pair->number(), id, syndrome,
                        queue.failed ? static_cast<std::uint8_t>(completion.vendor_err) : std::uint8_t{0}};
}

}  // namespace deep_ep::rdma::verbs
