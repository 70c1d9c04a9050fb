#include "csrc/rdma/verbs/send_queue.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

constexpr std::size_t kBounceSlotBytes = 32;
constexpr std::size_t kBatch = 32;  // work requests that are handed over by one call

ibv_wr_opcode opcode_of(WireOperationKind kind) {
  return kind == WireOperationKind::fetch_add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_RDMA_WRITE;
}

}  // namespace

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

SendQueue::SendQueue(std::shared_ptr<Device> device, std::unique_ptr<QueuePair> pair, std::uint32_t serial)
    : device_(std::move(device)),
      pair_(std::move(pair)),
      serial_(serial),
      report_every_(std::max<std::uint32_t>(pair_->send_depth() / 4, 1)) {
  if (pair_->inline_bytes() < kMaxInlineBytes) {
    bounce_.resize(kBounceSlotBytes * pair_->send_depth());
    bounce_registration_ = Registration::of_host_memory(device_, {.address = bounce_.data(), .bytes = bounce_.size()});
  }
}

void SendQueue::check(const WireOperation& operation) const {
  if (operation.kind == WireOperationKind::write_inline && operation.length > kMaxInlineBytes) {
    deep_ep::fail<InvalidArgument>("an inline write of {} bytes, allowed: 0 to {}", operation.length, kMaxInlineBytes);
  }
  if (operation.kind == WireOperationKind::fetch_add && operation.length != sizeof(std::uint64_t)) {
    deep_ep::fail<InvalidArgument>("a fetch-and-add of {} bytes, allowed: 8", operation.length);
  }
}

const void* SendQueue::inline_source(const WireOperation& operation, std::uint32_t index) {
  if (bounce_.empty()) return operation.inline_bytes.data();
  std::byte* slot = bounce_.data() + kBounceSlotBytes * (index % pair_->send_depth());
  std::memcpy(slot, operation.inline_bytes.data(), operation.length);
  return slot;
}

std::size_t SendQueue::post(std::span<const WireOperation> operations, std::deque<WireCompletion>& ready) {
  for (const WireOperation& operation : operations) check(operation);
  if (failed_) {
    for (const WireOperation& operation : operations) {
      report({operation.id, operation.signalled}, Syndrome::flushed, 0, ready);
    }
    return operations.size();
  }

  std::array<ibv_send_wr, kBatch> requests;
  std::array<ibv_sge, kBatch> pieces;
  std::size_t taken = 0;
  while (taken < operations.size()) {
    const std::size_t room = pair_->send_depth() - pending_.size();
    const std::size_t count = std::min({operations.size() - taken, room, kBatch});
    if (count == 0) break;
    for (std::size_t i = 0; i < count; ++i) {
      const WireOperation& operation = operations[taken + i];
      const auto index = static_cast<std::uint32_t>(oldest_ + pending_.size() + i);
      ibv_send_wr& request = requests[i];
      ibv_sge& piece = pieces[i];
      request = {};
      request.wr_id = std::uint64_t{serial_} << 32 | index;
      request.next = i + 1 < count ? &requests[i + 1] : nullptr;
      request.opcode = opcode_of(operation.kind);
      // Verbs drop empty pieces, some providers refuse them.
      request.sg_list = operation.length > 0 ? &piece : nullptr;
      request.num_sge = operation.length > 0 ? 1 : 0;
      piece = {operation.local_address, operation.length, operation.local_key};
      if (operation.kind == WireOperationKind::write_inline) {
        piece.addr = reinterpret_cast<std::uint64_t>(inline_source(operation, index));
        piece.lkey = bounce_registration_ ? bounce_registration_->local_key() : 0;
        if (bounce_.empty()) request.send_flags |= IBV_SEND_INLINE;
      }
      if (operation.kind == WireOperationKind::fetch_add) {
        request.wr.atomic = {.remote_addr = operation.remote_address,
                             .compare_add = operation.add,
                             .swap = 0,
                             .rkey = operation.remote_key};
      } else {
        request.wr.rdma = {.remote_addr = operation.remote_address, .rkey = operation.remote_key};
      }
      if (operation.signalled || ++since_reported_ >= report_every_) {
        request.send_flags |= IBV_SEND_SIGNALED;
        since_reported_ = 0;
      }
    }

    ibv_send_wr* refused = nullptr;
    const int error = ibv_post_send(pair_->get(), requests.data(), &refused);
    const auto accepted = error == 0           ? count
                          : refused != nullptr ? static_cast<std::size_t>(refused - requests.data())
                                               : 0;
    for (std::size_t i = 0; i < accepted; ++i) {
      pending_.push_back({operations[taken + i].id, operations[taken + i].signalled});
    }
    taken += accepted;
    if (error == 0) continue;
    if (error != ENOMEM) {
      deep_ep::fail<SystemError>("RDMA device {}: ibv_post_send to queue pair {:#x}: {}", device_->name(),
                                 pair_->number(), errno_text(error));
    }
    // Full, although there should be room: the next request must ask for a completion, or nothing frees room.
    since_reported_ = report_every_;
    break;
  }
  return taken;
}

void SendQueue::complete(const ibv_wc& completion, std::deque<WireCompletion>& ready) {
  // The failure has been reported; what the device still says about this queue pair is not news.
  if (failed_) return;
  const auto behind = static_cast<std::uint32_t>(completion.wr_id) - oldest_;
  if (behind >= pending_.size()) {
    deep_ep::fail<SystemError>("RDMA device {}: queue pair {:#x} completed a request that was not posted",
                               device_->name(), pair_->number());
  }
  // Everything before it succeeded: requests of one queue pair complete in order.
  for (std::uint32_t i = 0; i < behind; ++i) {
    report(pending_.front(), Syndrome::none, 0, ready);
    pending_.pop_front();
    ++oldest_;
  }
  const Syndrome syndrome = syndrome_of(completion.status);
  if (syndrome != Syndrome::none) {
    fail(syndrome, static_cast<std::uint8_t>(completion.vendor_err), ready);
    return;
  }
  report(pending_.front(), Syndrome::none, 0, ready);
  pending_.pop_front();
  ++oldest_;
}

void SendQueue::fail(Syndrome syndrome, std::uint8_t vendor, std::deque<WireCompletion>& ready) {
  failed_ = true;
  for (const Pending& pending : pending_) {
    report(pending, syndrome, vendor, ready);
    syndrome = Syndrome::flushed;
    vendor = 0;
  }
  pending_.clear();
}

void SendQueue::report(const Pending& pending, Syndrome syndrome, std::uint8_t vendor,
                       std::deque<WireCompletion>& ready) const {
  if (syndrome == Syndrome::none && !pending.report) return;
  ready.push_back({.queue_pair = pair_->number(), .id = pending.id, .syndrome = syndrome, .vendor_syndrome = vendor});
}

}  // namespace deep_ep::rdma::verbs
