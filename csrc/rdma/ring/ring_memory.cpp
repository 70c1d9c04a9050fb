#include "csrc/rdma/ring/ring_memory.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/memory/executor_memory.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::size_t kPage = 65536;  // the largest of a host

std::byte* aligned(const std::shared_ptr<std::byte>& memory, std::size_t to) {
  return memory.get() + (to - reinterpret_cast<std::uintptr_t>(memory.get()) % to) % to;
}

}  // namespace

RingMemory::RingMemory(std::shared_ptr<Executor> executor, const RingOptions& options)
    : executor_(std::move(executor)), stream_(*executor_), options_(options) {
  const std::size_t bytes = options_.count * options_.bytes() + options_.alignment;
  allocation_ =
      options_.on_gpu ? device_memory<std::byte>(executor_, bytes) : pinned_memory<std::byte>(executor_, bytes);
  rings_ = aligned(allocation_, options_.alignment);
  states_ = device_copy(executor_, std::vector<RdmaQueueState>(options_.count));
  pinned_ = pinned_memory<std::byte>(executor_, record_bytes() + options_.count * sizeof(std::uint64_t) + kPage);
  pages_ = aligned(pinned_, kPage);
  std::fill_n(producer_index(0), options_.count, 0);
  // All ones: entries with no known opcode, and a completion that is not yet written.
  executor_->fill(rings_, 0xff, options_.count * options_.bytes(), stream_.get());
  for (std::size_t i = 0; i < options_.count; ++i) {
    executor_->fill(begin(i) + options_.doorbell(), 0, RingOptions::kLine, stream_.get());
  }
  executor_->synchronize(stream_.get());
}

std::size_t RingMemory::record_bytes() const {
  return options_.records_apart ? (options_.count * 2 * sizeof(std::uint32_t) + kPage - 1) / kPage * kPage : 0;
}

bool RingStatus::failed() const {
  return state.failure != 0 || (state.posted != state.completed &&
                                device::rdma::tail_opcode(completion.tail) == device::rdma::kCompletionError);
}

std::uint32_t RingStatus::outstanding() const {
  const auto all = static_cast<std::uint32_t>(state.posted - state.completed);
  if (all == 0 || device::rdma::tail_opcode(completion.tail) != device::rdma::kCompletionOk) return all;
  // The device reports the lowest 16 bits of the entry that completed last, and the last entry posted asks for that.
  return static_cast<std::uint32_t>(state.posted - 1 - device::rdma::tail_counter(completion.tail)) & 0xffffu;
}

bool RingMemory::host_reads() const { return !options_.on_gpu || executor_->device().kind == Device::Kind::cpu; }

std::vector<RingStatus> RingMemory::status() const {
  std::vector<RingStatus> status(options_.count);
  for (std::size_t i = 0; i < options_.count; ++i) {
    executor_->copy(&status[i].state, states_.get() + i, sizeof(RdmaQueueState), stream_.get());
    if (!host_reads()) {
      executor_->copy(&status[i].completion, completion(i), sizeof status[i].completion, stream_.get());
    }
  }
  executor_->synchronize(stream_.get());
  for (std::size_t i = 0; i < options_.count && host_reads(); ++i) {
    // Its last word says that it is there, and may be written at this moment.
    status[i].completion.tail = __atomic_load_n(&completion(i)->tail, __ATOMIC_ACQUIRE);
    if (status[i].failed()) status[i].completion = *completion(i);
  }
  return status;
}

}  // namespace deep_ep::rdma
