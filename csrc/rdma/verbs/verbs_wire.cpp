#include "csrc/rdma/verbs/verbs_wire.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// The name that mlx5 devices give to a failed verbs completion. The argument is an ibv_wc_status.
Syndrome syndrome_of(int status) {
  constexpr std::pair<ibv_wc_status, Syndrome> kSyndromes[] = {
      {IBV_WC_SUCCESS, Syndrome::none},
      {IBV_WC_LOC_LEN_ERR, Syndrome::local_length},
      {IBV_WC_LOC_PROT_ERR, Syndrome::local_protection},
      {IBV_WC_WR_FLUSH_ERR, Syndrome::flushed},
      {IBV_WC_MW_BIND_ERR, Syndrome::memory_window_bind},
      {IBV_WC_BAD_RESP_ERR, Syndrome::bad_response},
      {IBV_WC_LOC_ACCESS_ERR, Syndrome::local_access},
      {IBV_WC_REM_INV_REQ_ERR, Syndrome::remote_invalid_request},
      {IBV_WC_REM_ACCESS_ERR, Syndrome::remote_access},
      {IBV_WC_REM_OP_ERR, Syndrome::remote_operation},
      {IBV_WC_RETRY_EXC_ERR, Syndrome::transport_retries_exceeded},
      {IBV_WC_RESP_TIMEOUT_ERR, Syndrome::transport_retries_exceeded},
      {IBV_WC_RNR_RETRY_EXC_ERR, Syndrome::receiver_not_ready_retries_exceeded},
      {IBV_WC_REM_ABORT_ERR, Syndrome::remote_aborted},
  };
  for (const auto& [code, syndrome] : kSyndromes) {
    if (code == status) return syndrome;
  }
  // Local queue pair errors, and what has no code of its own (fatal, general).
  return Syndrome::local_queue_pair;
}

}  // namespace

VerbsWire::VerbsWire(std::shared_ptr<Device> device, std::size_t count, std::uint32_t depth)
    : device_(std::move(device)),
      depth_(depth),
      // An overrun completion queue loses completions, so every request under way has its place in it.
      completion_queue_(make_completion_queue(device_, static_cast<std::uint32_t>(count) * depth)) {
  while (queues_.size() < count) queues_.push_back({.pair = {device_, completion_queue_, depth}});
}

std::size_t VerbsWire::post(std::size_t ring, std::span<const Operation> operations) {
  SendQueue& queue = queues_[ring];
  constexpr std::size_t kBatch = 64;  // work requests that are handed over by one call
  std::array<ibv_send_wr, kBatch> requests;
  std::array<ibv_sge, kBatch> pieces;
  const std::size_t count = std::min(operations.size(), kBatch);
  for (std::size_t i = 0; i < count; ++i) {
    const Operation& operation = operations[i];
    ibv_send_wr& request = requests[i];
    request = {};
    request.wr_id = std::uint64_t{ring} << 32 | static_cast<std::uint32_t>(operation.index);
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
    if (operation.signalled || ++queue.since_reported >= std::max(depth_ / 4, 1U)) {
      request.send_flags |= IBV_SEND_SIGNALED;
      queue.since_reported = 0;
    }
  }

  ibv_send_wr* refused = nullptr;
  const int error = ibv_post_send(queue.pair.get(), requests.data(), &refused);
  const auto accepted = error == 0           ? count
                        : refused != nullptr ? static_cast<std::size_t>(refused - requests.data())
                                             : 0;
  // Full, although there should be room: the next request must ask for a completion, or nothing frees room.
  if (error == ENOMEM) {
    queue.since_reported = depth_;
  } else if (error != 0) {
    require(device_->name(), error, fmt::format("ibv_post_send to queue pair {:#x}", queue.pair.number()));
  }
  return accepted;
}

std::size_t VerbsWire::poll(std::span<WireCompletion> completions) {
  std::array<ibv_wc, 32> polled;
  const int count = ibv_poll_cq(completion_queue_.get(), static_cast<int>(std::min(polled.size(), completions.size())),
                                polled.data());
  if (count < 0) fail<SystemError>("RDMA device {}: ibv_poll_cq gives {}", device_->name(), count);
  if (count == 0 && device_->has_failed()) {
    fail<SystemError>("RDMA device {} reported a fatal error: nothing on it completes any more", device_->name());
  }
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = polled[static_cast<std::size_t>(i)];
    const Syndrome syndrome = syndrome_of(completion.status);
    completions[static_cast<std::size_t>(i)] = {
        completion.wr_id >> 32, static_cast<std::uint32_t>(completion.wr_id), syndrome,
        syndrome == Syndrome::none ? std::uint8_t{0} : static_cast<std::uint8_t>(completion.vendor_err)};
  }
  return static_cast<std::size_t>(count);
}

}  // namespace deep_ep::rdma::verbs
